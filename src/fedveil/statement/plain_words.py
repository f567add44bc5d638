"""The statement's sentences: what an adversary can and cannot learn, and whether the model can learn."""

from __future__ import annotations

import math

from fedveil.accounting.formatting import at_most, percent_at_most
from fedveil.accounting.learnability import Learnability, expected_share, gathered_ratio
from fedveil.accounting.types import Adjacency, Unit, View
from fedveil.statement.statement import FPR, SIMULATION_ONLY, Statement, ViewNumbers

SEES = {
    View.SERVER: "the server, which sees each upload",
    View.AGGREGATE: "whoever sees each round's aggregate, and so every global model, as every client does",
    View.FINAL: "an outsider, who sees the last model only",
}
_FPR = f"{100 * FPR:g} %"


def unit_in_words(statement: Statement) -> str:
    """What is protected, and what the neighbouring data differ in."""
    zero = statement.scope.adjacency is Adjacency.ZERO_OUT
    if statement.scope.unit is Unit.CLIENT:
        return "a given client contributed or contributed nothing" if zero else "a given client held these data or any others"
    return "a given record was used or left out" if zero else "a given record was used or another in its place"


def in_words(statement: Statement) -> str:
    """What an adversary with each view can and cannot learn, in one paragraph."""
    sentences = [SIMULATION_ONLY[0].upper() + SIMULATION_ONLY[1:] + "."] if SIMULATION_ONLY in statement.warnings else []
    sentences.append(_promise(statement))
    sentences += [_refuted(statement)] if statement.contradictions() else []
    others = [v for v in statement.views if v is not statement.own]
    sentences += [_other(statement, numbers) for numbers in others if _differs(numbers, statement.own)]
    if not math.isinf(statement.proven.epsilon):
        common = "clients" if statement.scope.unit is Unit.CLIENT else "records"
        sentences.append(
            f"What is common to many {common} can be learned from the model, and is meant to be; what is peculiar to one is what "
            f"the bound hides."
        )
    return " ".join(sentences)


def _promise(statement: Statement) -> str:
    own = statement.own
    who, most = SEES[own.view], percent_at_most(own.tpr)
    if math.isinf(own.proven.epsilon):
        return (
            f"Nothing is proven against {who} ({own.proven.scope}, delta = {statement.delta:g}): {own.proven.reason}. Such an "
            f"adversary must be assumed able to tell for certain whether {unit_in_words(statement)}."
        )
    return (
        f"Take {who}, and suppose this adversary knows everything except whether {unit_in_words(statement)}. Whatever the "
        f"attack, one that accuses wrongly at most {_FPR} of the time detects rightly at most {most} of the time "
        f"(guessing blindly: {_FPR}). That is what {own.proven} means, proven under the assumptions listed.{_strength(own.tpr)}"
        f"{_seen_count(own)}"
    )


def _seen_count(own: ViewNumbers) -> str:
    """From whom the number of participants must be hidden, and what it costs where it is seen."""
    if own.seen_count is None:
        return ""
    return (
        f" It needs the number of participants of each round to be hidden from this adversary: against one who sees that number "
        f"too, epsilon is {at_most(own.seen_count)}."
    )


def _strength(tpr: float) -> str:
    if tpr <= 0.2:
        return " This is strong protection."
    if tpr <= 0.6:
        return " This is moderate protection."
    return (
        " This is weak protection against a determined attacker in the worst case."
        if tpr < 0.99
        else " In the worst case this is next to no protection."
    )


def _differs(numbers: ViewNumbers, own: ViewNumbers) -> bool:
    return abs(numbers.tpr - own.tpr) > 1e-9 or math.isinf(numbers.proven.epsilon) != math.isinf(own.proven.epsilon)


def _other(statement: Statement, numbers: ViewNumbers) -> str:
    who = SEES[numbers.view]
    if math.isinf(numbers.proven.epsilon):
        return f"Against {who}, nothing is proven: {numbers.proven.reason}."
    return f"Against {who}, detection is limited to {percent_at_most(numbers.tpr)} at the same rate of wrong accusations."


def _refuted(statement: Statement) -> str:
    labels = [c.label for c in statement.contradictions()]
    if "REFUTED" not in labels:
        return "An estimate from an attack lies above a number given here; treat that number with suspicion."
    return "An attack on this very configuration learned more than a number given here allows: that number is REFUTED."


def verdict_in_words(learnability: Learnability) -> str:
    """The verdict of the run's own view in a sentence."""
    level = learnability.level(learnability.scope.view)
    if level.ratio is None:
        return level.note
    times = f"the noise is about {level.ratio:.3g} times as long as the longest possible {learnability.what}"
    return {
        "yes": f"Yes, as far as noise goes: {times}.",
        "perhaps": f"Perhaps: {times}; it has to average out over the rounds.",
        "no": f"Hardly: {times}, more than the rounds can average out.",
    }[learnability.verdict]


def gathered_in_words(learnability: Learnability) -> str:
    """What that means over all rounds, by runs that were measured; empty where the statement does not say how many there are."""
    level = learnability.level(learnability.scope.view)
    if level.ratio is None or not learnability.steps:
        return ""
    gathered = gathered_ratio(level.ratio, learnability.steps)
    records = " Single records need less noise: fedveil plan shows both units, each with what may be kept."
    return (
        f"Over {learnability.steps} of them it is {gathered:.2g} times as long as the signal. Linear models kept about "
        f"{100 * expected_share(gathered):.0f} % of their accuracy above chance at that level (docs/utility.md)."
        f"{records if learnability.scope.unit is Unit.CLIENT and learnability.verdict == 'no' else ''}"
    )


def kind_line(statement: Statement) -> str:
    """Delta, unit and adjacency in one line."""
    scope = statement.scope
    return f"delta = {statement.delta:g}, {scope.unit} level, {scope.adjacency.replace('_', '-')}"


def scope_line(statement: Statement) -> str:
    """Unit, adjacency, view and delta in one line."""
    return f"delta = {statement.delta:g}, {statement.scope}"


def run_line(statement: Statement) -> str:
    """Clients, sampling, rounds and dimension in one line."""
    s = statement
    return f"{s.cohort} of {s.clients} clients a round ({s.sampling} sampling), {s.rounds} rounds, {s.dimension} coordinates"
