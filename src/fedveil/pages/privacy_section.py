"""The privacy part of a report: the statement and the spending, as plain values whose words are the statement's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedveil.accounting.formatting import at_least, epsilon, number, percent_at_most
from fedveil.accounting.types import Audit, Claim, Unit, View
from fedveil.pages.spent import Spent, spent
from fedveil.run.recorded_run import RunData
from fedveil.run.verification import verified_ledger
from fedveil.statement.plain_words import scope_line
from fedveil.statement.statement import Statement
from fedveil.statement.statement_text import TextCell, TextTable, facts, if_seen, numbers_table, statement_text, variant_of
from fedveil.verify import Verification

Values = dict[str, Any]
SEES = {
    View.SERVER: "sees every upload",
    View.AGGREGATE: "sees every round's aggregate",
    View.FINAL: "sees the last model only",
}
UNBOUNDED = "no bound"


def privacy_values(runs: Sequence[RunData]) -> Values:
    """Claimed, proven and audited with their scopes, the table of views, and what the statement says in words.

    Of runs that differ in their seed only: the largest proven epsilon, the audits of all, and what any of them contradicts.
    """
    found = [run.statement for run in runs if run.statement is not None]
    if not found:
        return {"scope": None, "proven_value": None, "statement": None, "promise": _NO_STATEMENT, "cards": {}}
    largest = max(found, key=lambda s: s.proven.epsilon)
    s = largest.with_audits(a for other in found if other is not largest for v in other.views for a in v.audits)
    text = {key: asdict(section) for key, section in statement_text(s).items()}
    proven = sorted({_epsilon(one.proven.epsilon): one.proven.epsilon for one in found}.items(), key=lambda item: item[1])
    differ = f"The runs do not prove the same epsilon ({', '.join(shown for shown, _ in proven)}): the largest is shown."
    warnings = [*(w for one in found for w in one.warnings), *([differ] if len(proven) > 1 else [])]
    contradictions = [str(c) for one in found for c in one.contradictions()]
    return {
        "scope": scope_line(s),
        "proven_value": s.proven.epsilon if math.isfinite(s.proven.epsilon) else None,
        "promise": _promise(s),
        "cards": {"claimed": _claimed(s.claimed), "proven": _proven(s), "audited": _audited(s)},
        "statement": {
            "variant": variant_of(s),
            "sections": {**text, "numbers": {**text["numbers"], "table": asdict(_with_who(s, found))}},
            "facts": {name: value for name, value in facts(s).items() if name != "promise"},  # the cards tell it
            "warnings": list(dict.fromkeys(warnings)),
            "contradictions": list(dict.fromkeys(contradictions)),
        },
    }


_NO_STATEMENT = [("The run directory holds no privacy statement.", False)]


def _promise(s: Statement) -> list[tuple[str, bool]]:
    """What the run is worth in one sentence, as pieces of text and whether they are bold."""
    who = SEES[s.own.view]
    if math.isinf(s.proven.epsilon):
        return [(f"Against an attacker who {who}, ", False), ("nothing is proven", True), (f": {s.proven.reason}.", False)]
    what = "a given client's contribution" if s.scope.unit is Unit.CLIENT else "the use of a given record"
    start = f"An attacker who {who}, and accuses wrongly at most 5 % of the time, detects {what} "
    return [(start, False), (f"at most {percent_at_most(s.own.tpr)}", True), (" of the time.", False)]


def card_of(title: str, value: str, order: float | None, *lines: str) -> Values:
    """One large number with its small print; `order` sorts the table of several runs."""
    return {"title": title, "value": value, "order": order, "lines": [line for line in lines if line]}


def _claimed(claim: Claim | None) -> Values:
    if claim is None:
        return card_of("Claimed ε", "–", None, "No paper's formula speaks of this configuration.")
    return card_of(
        "Claimed ε",
        epsilon(claim.epsilon, UNBOUNDED, number),
        claim.epsilon,
        f"delta = {claim.delta:g}, {claim.scope}",
        claim.source,
    )


def _proven(s: Statement) -> Values:
    why = s.proven.reason or f"accountant: {s.accountant}"
    return card_of("Proven ε", _epsilon(s.proven.epsilon), s.proven.epsilon, scope_line(s), why, if_seen(s.own))


def _audited(s: Statement) -> Values:
    audit: Audit | None = max((v.audited for v in s.views if v.audited), key=lambda a: (a.rigorous, a.epsilon), default=None)
    if audit is None:
        return card_of("Audited ε", "–", None, "No attack on this configuration is on record: fedveil audit RUN adds one.")
    sign, how = ("≥", "at least") if audit.rigorous else ("≈", "estimated")
    value = f"{sign} {epsilon(audit.epsilon, '∞', at_least)}"
    return card_of("Audited ε", value, audit.epsilon, f"delta = {audit.delta:g}, {audit.scope}", f"{how}, {audit.how}")


def _with_who(s: Statement, among: Sequence[Statement]) -> TextTable:
    """The table of views, with what each of them sees."""
    table = numbers_table(s, among, UNBOUNDED)
    rows = ((first, TextCell(SEES[v.view]), *others) for v, (first, *others) in zip(s.views, table.rows, strict=True))
    first, *others = table.headings
    return replace(table, headings=(first, "who", *others), rows=tuple(rows))


def _epsilon(value: float) -> str:
    return epsilon(value, UNBOUNDED)


def spent_values(
    runs: Sequence[RunData],
    progress: Callable[[int, int], None] | None = None,
    checked: Mapping[Path, Verification] | None = None,
) -> Values | None:
    """Epsilon over the rounds, from the ledger: of several runs, that of the one that spent most."""
    known = {path: verified_ledger(found) for path, found in (checked or {}).items()}
    each = [
        (run, spent(run.path / "ledger.sqlite", s.scope, s.delta, s.clients, progress, known.get(run.path, "")), s)
        for run in runs
        if (s := run.statement)
    ]
    if not each:
        return None
    run, found, s = max(each, key=lambda one: _end(one[1]))
    ends = sorted({_epsilon(_end(other)): _end(other) for _, other, _ in each if other.most}.items(), key=lambda item: item[1])
    unknown = [f"Seed {other.seed}: {known.problem}" for other, known, _ in each if found.most and not known.most]
    return {
        "most": found.most,
        "median": found.median,
        "releases": found.releases,
        "problem": found.problem,
        "each": bool(found.median),
        "target": None if s.target_epsilon is None else {"y": s.target_epsilon, "label": f"target {number(s.target_epsilon)}"},
        "unknown": unknown,
        "differ": f"The seeds spent {ends[0][0]} to {ends[-1][0]}: drawn is seed {run.seed}." if len(ends) > 1 else "",
    }


def _end(found: Spent) -> float:
    """Epsilon after the last round; below all others where it is not known."""
    return found.most[-1][1] if found.most else -1.0
