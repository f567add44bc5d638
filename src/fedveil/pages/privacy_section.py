"""The privacy part of a report: the statement and the spending, as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from fedveil.accounting.types import View
from fedveil.pages.spent import Spent, spent
from fedveil.run.recorded_run import RunData
from fedveil.statement.statement import Statement
from fedveil.statement.statement_text import audited_cell, claimed_cell, kind_line, number, percent, scope_line, verdict_in_words

SEES = {
    View.SERVER: "sees every upload",
    View.AGGREGATE: "sees every round's aggregate",
    View.FINAL: "sees the last model only",
}


def privacy_values(runs: Sequence[RunData]) -> dict[str, Any]:
    """Claimed, proven and audited with their scopes, the table of views, and what the statement says in words.

    Of runs that differ in their seed only: the largest proven epsilon, the audits of all, and what any of them contradicts.
    """
    found = [run.statement for run in runs if run.statement is not None]
    if not found:
        return {"scope": None, "proven_value": None, "statement": None}
    largest = max(found, key=lambda s: s.proven.epsilon)
    s = largest.with_audits(a for other in found if other is not largest for v in other.views for a in v.audits)
    own = s.own
    claim = s.claimed
    audit = max((v.audited for v in s.views if v.audited), key=lambda a: (a.rigorous, a.epsilon), default=None)
    proven = sorted({_epsilon(one.proven.epsilon): one.proven.epsilon for one in found}.items(), key=lambda item: item[1])
    differ = [f"The runs do not prove the same epsilon ({', '.join(text for text, _ in proven)}): the largest is shown."]
    return {
        "scope": scope_line(s),
        "proven_value": own.proven.epsilon if math.isfinite(own.proven.epsilon) else None,
        "statement": {
            "method": s.method,
            "variant": s.variant,
            "kind": kind_line(s),
            "sees": SEES[own.view],
            "unit": str(s.scope.unit),
            "tpr": percent(own.tpr),
            "target": s.target_epsilon,
            "noise_multiplier": s.noise_multiplier,
            "accountant": s.accountant,
            "dimension": s.dimension,
            "who": f"{s.cohort} of {s.clients} clients a round ({s.sampling} sampling)",
            "proven": {"value": _epsilon(own.proven.epsilon), "scope": scope_line(s), "reason": own.proven.reason},
            "claimed": claim
            and {"value": _epsilon(claim.epsilon), "scope": f"delta = {claim.delta:g}, {claim.scope}", "source": claim.source},
            "audited": audit
            and {
                "value": f"{'≥' if audit.rigorous else '≈'} {'∞' if math.isinf(audit.epsilon) else number(audit.epsilon)}",
                "order": audit.epsilon,
                "scope": f"delta = {audit.delta:g}, {audit.scope}",
                "how": f"{'at least' if audit.rigorous else 'estimated'}, {audit.how}",
            },
            "views": [_view(s, view, found) for view in View],
            "words": s.in_words(),
            "warnings": [*dict.fromkeys(w for one in found for w in one.warnings), *(differ if len(proven) > 1 else [])],
            "contradictions": list(dict.fromkeys(str(c) for one in found for c in one.contradictions())),
            "assumptions": [{"what": a.what, "why": a.why} for a in s.assumptions],
            "not_protected": list(s.not_protected),
            "notes": list(s.notes),
            "learn": verdict_in_words(s.learnability) if s.learnability else "",
            "verdict": s.learnability.verdict if s.learnability else "",
        },
    }


def _view(s: Statement, view: View, found: Sequence[Statement]) -> dict[str, Any]:
    v = s.view(view)
    names: tuple[Literal["claimed", "proven"], ...] = ("claimed", "proven")
    refuted = {name: {c.label for one in found if (c := one.contradiction(view, name))} for name in names}
    marks = {name: max(labels) for name, labels in refuted.items() if labels}  # REFUTED before IN DOUBT
    return {
        "view": str(view),
        "sees": SEES[view],
        "own": view is s.scope.view,
        "claimed": claimed_cell(s, v.claimed),
        "proven": _epsilon(v.proven.epsilon),
        "audited": audited_cell(s, v.audited),
        "tpr": percent(v.tpr),
        "reason": v.proven.reason,
        "marks": marks,
    }


def _epsilon(value: float) -> str:
    return "no bound" if math.isinf(value) else number(value)


def spent_values(runs: Sequence[RunData]) -> dict[str, Any] | None:
    """Epsilon over the rounds, from the ledger: of several runs, that of the one that spent most."""
    each = [(run, spent(run.path / "ledger.sqlite", s.scope, s.delta, s.clients), s) for run in runs if (s := run.statement)]
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
        "target": s.target_epsilon,
        "unknown": unknown,
        "differ": f"The seeds spent {ends[0][0]} to {ends[-1][0]}: drawn is seed {run.seed}." if len(ends) > 1 else "",
    }


def _end(found: Spent) -> float:
    """Epsilon after the last round; below all others where it is not known."""
    return found.most[-1][1] if found.most else -1.0
