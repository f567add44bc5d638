"""The privacy part of a report: the statement and the spending, as plain values."""

from __future__ import annotations

import math
from typing import Any, Literal

from fedveil.experiment.report_data import RunData
from fedveil.experiment.report_spent import spent
from fedveil.privacy.statement import Statement
from fedveil.privacy.statement_text import audited_cell, claimed_cell, kind_line, number, percent, scope_line, verdict_in_words
from fedveil.privacy.types import View

SEES = {
    View.SERVER: "sees every upload",
    View.AGGREGATE: "sees every round's aggregate",
    View.FINAL: "sees the last model only",
}


def privacy_values(s: Statement | None) -> dict[str, Any]:
    """Claimed, proven and audited with their scopes, the table of views, and what the statement says in words."""
    if s is None:
        return {"scope": None, "proven_value": None, "statement": None}
    own = s.own
    claim = s.claimed
    audit = max((v.audited for v in s.views if v.audited), key=lambda a: (a.rigorous, a.epsilon), default=None)
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
                "how": f"{'at least, ' if audit.rigorous else 'estimated, '}{audit.test}, {audit.confidence:.0%} confidence",
            },
            "views": [_view(s, view) for view in View],
            "words": s.in_words(),
            "warnings": list(s.warnings),
            "contradictions": [str(c) for c in s.contradictions()],
            "assumptions": [{"what": a.what, "why": a.why} for a in s.assumptions],
            "not_protected": list(s.not_protected),
            "notes": list(s.notes),
            "learn": verdict_in_words(s.learnability) if s.learnability else "",
            "verdict": s.learnability.verdict if s.learnability else "",
        },
    }


def _view(s: Statement, view: View) -> dict[str, Any]:
    v = s.view(view)
    names: tuple[Literal["claimed", "proven"], ...] = ("claimed", "proven")
    marks = {name: c.label for name in names if (c := s.contradiction(view, name))}
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


def spent_values(run: RunData) -> dict[str, Any] | None:
    """Epsilon over the rounds of a run, from its ledger."""
    s = run.statement
    if s is None:
        return None
    found = spent(run.path / "ledger.sqlite", s.scope, s.delta, s.clients)
    return {
        "most": found.most,
        "median": found.median,
        "releases": found.releases,
        "problem": found.problem,
        "each": bool(found.median),
        "target": s.target_epsilon,
    }
