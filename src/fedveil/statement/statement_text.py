"""The privacy statement in words: a paragraph for everybody, and a Markdown page."""

from __future__ import annotations

import math

from fedveil.accounting.learnability import Learnability
from fedveil.accounting.types import Adjacency, Audit, Claim, Guarantee, Unit, View
from fedveil.statement.statement import FPR, SIMULATION_ONLY, VIEWS, Statement, ViewNumbers

SEES = {
    View.SERVER: "the server, which sees each upload",
    View.AGGREGATE: "whoever sees each round's aggregate, and so every global model, as every client does",
    View.FINAL: "an outsider, who sees the last model only",
}


_FPR = f"{100 * FPR:g} %"


def number(epsilon: float) -> str:
    """An epsilon in four digits; only ever shown beside its unit, adjacency, view and delta."""
    return f"{epsilon:.4g}"


def percent(share: float) -> str:
    """A share as a percentage, rounded up so that a bound stays a bound."""
    if share >= 1:
        return "100 %"
    digits = 1 if share < 0.999 else min(12, -math.floor(math.log10(100 * (1 - share)) + 1e-9))
    scale = 10**digits
    return f"{math.ceil(100 * share * scale - 1e-9) / scale:.{digits}f} %"


def unit_in_words(statement: Statement) -> str:
    """What is protected, and what the neighbouring data differ in."""
    zero = statement.scope.adjacency is Adjacency.ZERO_OUT
    if statement.scope.unit is Unit.CLIENT:
        return "a given client contributed or contributed nothing" if zero else "a given client held these data or any others"
    return "a given record was used or left out" if zero else "a given record was used or another in its place"


# --- one paragraph ------------------------------------------------------------------------------------------------------


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
    who = SEES[own.view]
    if math.isinf(own.proven.epsilon):
        return (
            f"Nothing is proven against {who} ({own.proven.scope}, delta = {statement.delta:g}): {own.proven.reason}. Such an "
            f"adversary must be assumed able to tell for certain whether {unit_in_words(statement)}."
        )
    return (
        f"Take {who}, and suppose this adversary knows everything except whether {unit_in_words(statement)}. Whatever the "
        f"attack, one that accuses wrongly at most {_FPR} of the time detects rightly at most {percent(own.tpr)} of the time "
        f"(guessing blindly: {_FPR}). That is what {own.proven} means, proven under the assumptions listed.{_strength(own.tpr)}"
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
    return f"Against {who}, detection is limited to {percent(numbers.tpr)} at the same rate of wrong accusations."


def _refuted(statement: Statement) -> str:
    labels = [c.label for c in statement.contradictions()]
    if "REFUTED" not in labels:
        return "An estimate from an attack lies above a number given here; treat that number with suspicion."
    return "An attack on this very configuration learned more than a number given here allows: that number is REFUTED."


# --- Markdown -----------------------------------------------------------------------------------------------------------


def to_markdown(statement: Statement) -> str:
    """The whole statement as a Markdown page."""
    s = statement
    target = (
        "none (the noise was given)" if s.target_epsilon is None else f"epsilon = {number(s.target_epsilon)} at {scope_line(s)}"
    )
    parts = [
        f"# Privacy statement: {s.method} ({s.variant})",
        in_words(s),
        _bullets(
            [
                f"promise: {scope_line(s)}",
                f"target: {target}",
                f"noise multiplier: {'none' if s.noise_multiplier is None else f'{s.noise_multiplier:.6g}'}",
                f"accountant: {s.accountant}",
                f"run: {run_line(s)}",
            ]
        ),
        *(["## Warnings", _bullets(s.warnings)] if s.warnings else []),
        "## Claimed, proven, audited",
        f"Epsilon at {kind_line(s)}, unless a cell says otherwise.",
        _table(s),
        *(["## Contradictions", _bullets([str(c) for c in s.contradictions()])] if s.contradictions() else []),
        *(["## Can it learn?", _learnability(s.learnability)] if s.learnability else []),
        *(["## Assumptions", _bullets([f"{a.what} (why: {a.why})" for a in s.assumptions])] if s.assumptions else []),
        "## Not protected",
        _bullets(s.not_protected),
        *(["## Notes", _bullets(s.notes)] if s.notes else []),
    ]
    return "\n\n".join(parts) + "\n"


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


def _bullets(lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(statement: Statement) -> str:
    rows = [
        "| view | claimed | proven | audited | detected at most, at 5 % wrong accusations |",
        "| --- | --- | --- | --- | --- |",
    ]
    for view in VIEWS:
        numbers = statement.view(view)
        marks = [f" **{c.label}**" if (c := statement.contradiction(view, name)) else "" for name in ("claimed", "proven")]
        rows.append(
            f"| {view} | {claimed_cell(statement, numbers.claimed)}{marks[0]} | {proven_cell(numbers.proven)}{marks[1]} "
            f"| {audited_cell(statement, numbers.audited)} | {percent(numbers.tpr)} |"
        )
    return "\n".join(rows)


def proven_cell(proven: Guarantee) -> str:
    """The proven epsilon, with the reason when it is inf."""
    return f"inf: {proven.reason}" if math.isinf(proven.epsilon) else number(proven.epsilon)


def claimed_cell(statement: Statement, claim: Claim | None) -> str:
    """The claimed epsilon and its source, with unit, adjacency and delta where they differ from the statement's."""
    return "-" if claim is None else f"{number(claim.epsilon)}{_apart(statement, claim)} ({claim.source})"


def audited_cell(statement: Statement, audit: Audit | None) -> str:
    """The audited epsilon, its test and confidence."""
    if audit is None:
        return "-"
    kind = "at least" if audit.rigorous else "estimated"
    return f"{kind} {number(audit.epsilon)}{_apart(statement, audit)} ({audit.how})"


def _apart(statement: Statement, other: Claim | Audit) -> str:
    differs = []
    if other.scope.unit is not statement.scope.unit:
        differs.append(f"{other.scope.unit} level")
    if other.scope.adjacency is not statement.scope.adjacency:
        differs.append(other.scope.adjacency.replace("_", "-"))
    if other.delta != statement.delta:
        differs.append(f"delta = {other.delta:g}")
    return f" at {', '.join(differs)}" if differs else ""


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


def _learnability(block: Learnability) -> str:
    rows = ["| view | noise multiplier | noise norm | noise norm / clip |", "| --- | --- | --- | --- |"]
    for level in block.levels:
        if level.ratio is None or level.noise_multiplier is None or level.noise_norm is None:
            rows.append(f"| {level.view} | | | {level.note} |")
        else:
            rows.append(f"| {level.view} | {level.noise_multiplier:.4g} | {level.noise_norm:.4g} | {level.ratio:.4g} |")
    held = f"Clip norm {block.clip:g}; each view at the noise it needs for {held_promise(block)}."
    parts = [verdict_in_words(block), held, "\n".join(rows)]
    if block.advice:
        parts += [advice_heading(block), _bullets([a.text for a in block.advice])]
    return "\n\n".join(parts)


def held_promise(block: Learnability) -> str:
    """The epsilon that all levels and all advice keep."""
    kind = f"{block.scope.unit} level, {block.scope.adjacency.replace('_', '-')}"
    return f"epsilon = {number(block.epsilon)} at delta = {block.delta:g} ({kind}, in that view)"


def advice_heading(block: Learnability) -> str:
    """What the advice reaches."""
    return f"Any one of these brings the ratio to {block.target_ratio:g} at the same epsilon, delta and {block.scope.view} view:"
