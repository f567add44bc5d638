"""The sentences of a privacy statement, and the statement as a tree of plain strings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedveil.accounting.learnability import Learnability, expected_share, gathered_ratio
from fedveil.accounting.types import (
    Adjacency,
    Audit,
    Claim,
    Unit,
    View,
    at_least,
    at_most,
    count,
    epsilon,
    joined,
    number,
    percent_at_most,
    small,
)
from fedveil.methods.method_registry import METHODS
from fedveil.statement.statement import FPR, SIMULATION_ONLY, VIEWS, Statement, ViewNumbers

SEES = {
    View.SERVER: "the server, which sees each upload",
    View.AGGREGATE: "anyone who sees the sum of each round",
    View.FINAL: "an outsider, who sees the last model only",
}
_ATTACKER = {
    View.SERVER: "the server sees each upload",
    View.AGGREGATE: "an attacker sees every round's sum",
    View.FINAL: "an attacker sees the last model only",
}
_FPR = f"{100 * FPR:g} %"


def sees(statement: Statement, view: View) -> str:
    """Name the adversary of a view; with masks, the server sees sums, and single uploads only with all other clients' help."""
    shares = statement.shares
    if shares is None or shares.masks == "none" or view is View.FINAL:
        return SEES[view]
    if view is View.SERVER:
        return "the server with all other clients on its side"
    return f"{SEES[view]}, and the server if at most {_keys(shares.colluders)} its own or of clients that work with it"


def _keys(colluders: int) -> str:
    return f"{colluders} keys of the roster are" if colluders > 1 else "1 key of the roster is"


def unit_in_words(statement: Statement) -> str:
    """Describe the protected unit and how neighbouring data differ."""
    zero = statement.scope.adjacency is Adjacency.ZERO_OUT
    if statement.scope.unit is Unit.CLIENT:
        return "one client contributed" if zero else "one client held these data or any others"
    return "one record was used" if zero else "one record was used or another in its place"


def in_words(statement: Statement) -> str:
    """Describe in one paragraph what an adversary can and cannot learn in each view."""
    sentences = [SIMULATION_ONLY[0].upper() + SIMULATION_ONLY[1:] + "."] if SIMULATION_ONLY in statement.warnings else []
    sentences.append(_promise(statement))
    sentences += [_refuted(statement)] if statement.contradictions() else []
    others = [v for v in statement.views if v is not statement.own]
    sentences += [_other(statement, numbers) for numbers in others if _differs(numbers, statement.own)]
    if not math.isinf(statement.proven.epsilon):
        one = "client" if statement.scope.unit is Unit.CLIENT else "record"
        sentences.append(f"The model may show what many {one}s have in common. What is specific to one {one} stays hidden.")
    return " ".join(sentences)


def _promise(statement: Statement) -> str:
    own = statement.own
    who, most = sees(statement, own.view), percent_at_most(own.tpr)
    if math.isinf(own.proven.epsilon):
        return (
            f"Nothing is proven against {who} ({own.proven.scope}, delta = {small(statement.delta)}): {own.proven.reason}. "
            f"Assume that this attacker can tell for certain whether {unit_in_words(statement)}."
        )
    attacker = _ATTACKER[own.view]
    if statement.shares is not None and statement.shares.masks != "none" and own.view is View.AGGREGATE:
        attacker = f"{attacker}, is the server if at most {_keys(statement.shares.colluders)} its own or of its helpers,"
    return (
        f"Assume {attacker} and knows everything except whether {unit_in_words(statement)}. At {_FPR} false alarms no "
        f"attack finds that {statement.scope.unit} more than {most} of the time (guessing: {_FPR}). This is what "
        f"{own.proven} means, under the assumptions listed.{_strength(own.tpr)}{_seen_count(own)}"
    )


def _seen_count(own: ViewNumbers) -> str:
    """Say from whom the number of participants must be hidden, and the epsilon if it is observed."""
    if own.seen_count is None:
        return ""
    return f" {_SECRET_COUNT} {at_most(own.seen_count)}."


_SECRET_COUNT = "Keep the number of participants per round secret: an attacker who knows it gets epsilon"


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
    who = sees(statement, numbers.view)
    if math.isinf(numbers.proven.epsilon):
        return f"Against {who}, nothing is proven: {numbers.proven.reason}."
    return f"Against {who}, no attack finds it more than {percent_at_most(numbers.tpr)} of the time at the same false alarms."


def _refuted(statement: Statement) -> str:
    labels = [c.label for c in statement.contradictions()]
    if "REFUTED" not in labels:
        return "An estimate from an attack lies above a number given here; treat that number with suspicion."
    return "An attack on this very configuration learned more than a number given here allows: that number is REFUTED."


def verdict_in_words(learnability: Learnability) -> str:
    """Return the verdict of the run's own view in a sentence."""
    level = learnability.level(learnability.scope.view)
    if level.ratio is None:
        return level.note
    times = f"noise per round: {_percent_of(level.ratio)} of the largest {learnability.what}"
    return {
        "yes": f"Yes, as far as noise goes. {times[0].upper()}{times[1:]}.",
        "perhaps": f"Perhaps. {times[0].upper()}{times[1:]}; it has to average out over the rounds.",
        "no": f"Hardly. {times[0].upper()}{times[1:]}, more than the rounds can average out.",
    }[learnability.verdict]


def _percent_of(ratio: float) -> str:
    """Return a ratio in per cent; from 10 on as a factor."""
    return f"{100 * ratio:.2g} %" if ratio < 1 else f"{100 * ratio:,.0f} %" if ratio < 10 else f"{ratio:,.3g} times the size"


def gathered_in_words(learnability: Learnability) -> str:
    """Return the ratio over all rounds, judged by measured runs; empty if the statement does not give the number of rounds."""
    level = learnability.level(learnability.scope.view)
    if level.ratio is None or not learnability.steps:
        return ""
    gathered = gathered_ratio(level.ratio, learnability.steps)
    records = " Single records need less noise: fedveil plan shows both units, each with what may be kept."
    return (
        f"Over {count(learnability.steps)} rounds: {_percent_of(gathered)} of the signal. Linear models kept about "
        f"{100 * expected_share(gathered):.0f} % of their accuracy above chance at that level (docs/utility.md)."
        f"{records if learnability.scope.unit is Unit.CLIENT and learnability.verdict == 'no' else ''}"
    )


def _kind_line(statement: Statement) -> str:
    """Return delta, unit and adjacency in one line."""
    scope = statement.scope
    return f"delta = {small(statement.delta)}, {scope.unit} level, {scope.adjacency.replace('_', '-')}"


def scope_line(statement: Statement) -> str:
    """Return unit, adjacency, view and delta in one line."""
    return f"delta = {small(statement.delta)}, {statement.scope}"


def _promise_line(statement: Statement) -> str:
    """Return what the run promises, with its epsilon, in one line."""
    own = statement.own
    scope = (
        f"for each {statement.scope.unit}, against {sees(statement, own.view)} ({statement.scope.adjacency.replace('_', '-')})"
    )
    if math.isinf(own.proven.epsilon):
        return f"none: nothing is proven {scope}"
    return f"epsilon {at_most(own.proven.epsilon)}, delta {small(statement.delta)} {scope}"


def _method_in_words(statement: Statement) -> str:
    """Return what the method does: where the noise is added, for whom, and how many there are."""
    s = statement
    who = f"{count(s.clients)} clients"
    if math.isinf(s.proven.epsilon):
        return f"Training at {who}, nothing proven"
    if s.scope.unit is Unit.RECORD:
        return f"DP-SGD at {who}, averaged"
    where = "to each update" if s.scope.view is View.SERVER else "to the sum of each round"
    where += ", in shares by the clients" if s.shares is not None else ""
    return f"Updates of {who}, clipped and averaged, with noise added {where}"


def _proven_difference(statement: Statement) -> str:
    """Return how a proven variant differs from its paper; empty if the method does not say, or is not loaded."""
    known = statement.variant == "proven" and METHODS.ready(statement.method)
    return METHODS[statement.method].proven_difference if known else ""


def _run_line(statement: Statement) -> str:
    """Return clients, sampling, rounds and dimension in one line."""
    s = statement
    return (
        f"{count(s.cohort)} of {count(s.clients)} clients per round ({s.sampling} sampling), {count(s.rounds)} rounds"
        f"{f' and {s.shares.spare} spare attempts' if s.shares is not None else ''}, {count(s.dimension)} coordinates"
    )


Number = Literal["claimed", "proven"]


@dataclass(frozen=True)
class TextCell:
    """A cell of a table. badge: what must not be overlooked, as REFUTED. note: small print, as why an epsilon is inf."""

    text: str
    badge: str = ""
    note: str = ""
    strong: bool = False


@dataclass(frozen=True)
class TextTable:
    """Rows of cells under headings. own: the row of the view that the run promises. remarks: the notes, for narrow places."""

    headings: tuple[str, ...]
    rows: tuple[tuple[TextCell, ...], ...]
    own: int = -1
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A line of a list, and why."""

    text: str
    why: str = ""


@dataclass(frozen=True)
class TextSection:
    """A part of the statement, in this order: title, paragraphs, table, lead, items."""

    title: str
    paragraphs: tuple[str, ...] = ()
    table: TextTable | None = None
    lead: str = ""
    items: tuple[Item, ...] = ()
    tone: str = ""


Text = dict[str, TextSection]
"""The statement's sections by key, without those that are empty."""


def statement_text(statement: Statement) -> Text:
    """Return the sections of a statement, by name.

    Keys: words, facts, warnings, numbers, groups, contradictions, learn, assumptions, not_protected, notes.
    """
    s = statement
    sections = {
        "words": TextSection("In plain words", (in_words(s),)),
        "facts": TextSection("", items=tuple(Item(f"{name}: {value}") for name, value in facts(s).items())),
        "warnings": _list("Warnings", s.warnings, "warning"),
        "numbers": TextSection(
            "Claimed, proven, audited", (f"Epsilon at {_kind_line(s)}, unless a cell says otherwise.",), numbers_table(s)
        ),
        "groups": _groups(s),
        "contradictions": _list("Contradictions", [str(c) for c in s.contradictions()], "warning"),
        "learn": _learnability(s.learnability) if s.learnability else TextSection(""),
        "assumptions": TextSection("Assumptions", items=tuple(Item(a.what, a.why) for a in s.assumptions)),
        "not_protected": _list("Not protected", s.not_protected),
        "notes": _list("Notes", s.notes),
    }
    return {key: section for key, section in sections.items() if section.paragraphs or section.items}


def variant_of(statement: Statement) -> str:
    """Return the word after the method's name in a heading: `published`, or `proven` if anything is proven."""
    if statement.variant != "proven":
        return statement.variant
    if math.isinf(statement.proven.epsilon):
        return "nothing proven"
    return "simulation only" if SIMULATION_ONLY in statement.warnings else "proven"


def facts(statement: Statement) -> dict[str, str]:
    """Return the facts about the requested guarantee and the run."""
    s = statement
    target = f"epsilon = {number(s.target_epsilon)} at {scope_line(s)}" if s.target_epsilon is not None else _NO_TARGET
    return {
        "promise": _promise_line(s),
        "method": _method_in_words(s),
        **({"unlike the paper": difference} if (difference := _proven_difference(s)) else {}),
        "target": target,
        "noise multiplier": "none" if s.noise_multiplier is None else number(s.noise_multiplier, 6),
        "accountant": s.accountant,
        "run": _run_line(s),
    }


_NO_TARGET = "none (the noise was given)"
_HOW_TO_AUDIT = "fedveil audit RUN"
_EXPLAINED = "words: fedveil explain TERM, such as zero-out, delta or aggregate"
_NOT_AUDITED = f"audited -: no attack is on record; {_HOW_TO_AUDIT} adds one"


def numbers_table(statement: Statement, among: Sequence[Statement] = (), unbounded: str = "inf") -> TextTable:
    """The three numbers of each view.

    Args:
        among: statements of further runs of the same configuration, whose audits refute as well. unbounded: word for infinity.
    """
    s = statement
    rows, small_print = [], dict[tuple[str, str], list[str]]()
    for numbers in s.views:
        value, why = epsilon(numbers.proven.epsilon, unbounded), numbers.proven.reason or if_seen(numbers)
        if why:
            small_print.setdefault((value, why), []).append(str(numbers.view))
        claimed, proven = (_badge((s, *among), numbers.view, name) for name in ("claimed", "proven"))
        rows.append(
            (
                TextCell(str(numbers.view)),
                TextCell(_claimed_cell(s, numbers.claimed), claimed),
                TextCell(value, proven, why, strong=True),
                TextCell(_audited_cell(s, numbers.audited), note="" if numbers.audited else _HOW_TO_AUDIT),
                TextCell(percent_at_most(numbers.tpr)),
            )
        )
    remarks = [f"{value} in the {joined(views)} view: {why}" for (value, why), views in small_print.items()]
    if s.shares is not None and s.shares.masks != "none":
        remarks.append(f"server view: {sees(s, View.SERVER)}")
    if any(numbers.audited is None for numbers in s.views):
        remarks.append(_NOT_AUDITED)
    remarks.append(_EXPLAINED)
    headings = ("view", "claimed", "proven", "audited", "found at most, at 5 % false alarms")
    return TextTable(headings, tuple(rows), VIEWS.index(s.scope.view), ("* the view that this run promises", *remarks))


def _groups(statement: Statement) -> TextSection:
    """Return the number of clients with each cap; empty if all have the same."""
    if not statement.groups:
        return TextSection("")
    rows = tuple((TextCell(epsilon(group.epsilon)), TextCell(str(group.clients))) for group in statement.groups)
    lead = "Each client has a cap of its own, which is enforced upload by upload; the numbers above are those of the largest."
    return TextSection("Caps by client", (lead,), TextTable(("proven epsilon", "clients"), rows))


def if_seen(numbers: ViewNumbers) -> str:
    """Return epsilon against an adversary who sees how many took part, or an empty string if that changes nothing."""
    return "" if numbers.seen_count is None else f"{_SECRET_COUNT} {at_most(numbers.seen_count)}"


def _badge(statements: Sequence[Statement], view: View, name: Number) -> str:
    """Return the contradiction's label; REFUTED wins over IN DOUBT."""
    return max((c.label for s in statements if (c := s.contradiction(view, name))), default="")


def _claimed_cell(statement: Statement, claim: Claim | None) -> str:
    """Return the claimed epsilon and its source, with unit, adjacency and delta if they differ from the statement's."""
    return "-" if claim is None else f"{number(claim.epsilon)}{_apart(statement, claim)} ({claim.source})"


def _audited_cell(statement: Statement, audit: Audit | None) -> str:
    """Return the audited epsilon, its test and confidence."""
    if audit is None:
        return "-"
    kind = "at least" if audit.rigorous else "estimated"
    return f"{kind} {at_least(audit.epsilon)}{_apart(statement, audit)} ({audit.how})"


def _apart(statement: Statement, other: Claim | Audit) -> str:
    differs = []
    if other.scope.unit is not statement.scope.unit:
        differs.append(f"{other.scope.unit} level")
    if other.scope.adjacency is not statement.scope.adjacency:
        differs.append(other.scope.adjacency.replace("_", "-"))
    if other.delta != statement.delta:
        differs.append(f"delta = {small(other.delta)}")
    return f" at {', '.join(differs)}" if differs else ""


def _list(title: str, lines: Sequence[str], tone: str = "") -> TextSection:
    return TextSection(title, items=tuple(Item(line) for line in lines), tone=tone)


def _learnability(block: Learnability) -> TextSection:
    rows: list[tuple[TextCell, ...]] = []
    remarks = []
    for level in block.levels:
        values = (level.noise_multiplier, level.noise_norm, level.ratio)
        known = [number(value) for value in values if value is not None]
        if len(known) < len(values):
            remarks.append(f"{level.view} view: {level.note}")
            rows.append((TextCell(str(level.view)), TextCell(""), TextCell(""), TextCell("", note=level.note)))
        else:
            rows.append((TextCell(str(level.view)), *map(TextCell, known)))
    scope = block.scope
    kind = f"{scope.unit} level, {scope.adjacency.replace('_', '-')}"
    promise = f"epsilon = {at_most(block.epsilon)} at delta = {small(block.delta)} ({kind}, in that view)"
    said = (verdict_in_words(block), gathered_in_words(block))
    return TextSection(
        "Can it learn?",
        (*filter(None, said), f"Clip norm {block.clip:g}. Each view has the noise that it needs for {promise}."),
        TextTable(("view", "noise multiplier", "noise norm", "noise norm / clip"), tuple(rows), remarks=tuple(remarks)),
        f"Any one of these brings the ratio to {block.target_ratio:g} at the same epsilon, delta and {scope.view} view:"
        if block.advice
        else "",
        tuple(Item(advice.text) for advice in block.advice),
        block.verdict,
    )
