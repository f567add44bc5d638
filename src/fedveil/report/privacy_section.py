"""The privacy part of a report: statement, spending from the ledger, and verification."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting.accountant import bound, rdp_curve
from fedveil.accounting.gaussian import epsilon_of, rdp_epsilons
from fedveil.accounting.subsampled import ORDERS
from fedveil.accounting.types import (
    Audit,
    Claim,
    Event,
    Gaussian,
    Scope,
    Unbounded,
    Unit,
    View,
    at_least,
    epsilon,
    number,
    percent_at_most,
    small,
)
from fedveil.errors import LedgerError
from fedveil.experiment.recorded_run import RunData
from fedveil.experiment.verification import TITLES, headline, lines_by_kind, printable, verified_ledger
from fedveil.ledger.budgeted_ledger import charged, charged_to
from fedveil.ledger.ledger import Ledger
from fedveil.statement.statement import Statement
from fedveil.statement.statement_text import (
    TextCell,
    TextTable,
    facts,
    if_seen,
    numbers_table,
    scope_line,
    statement_text,
    variant_of,
)
from fedveil.verify import Verification

_ORDERS = np.array(ORDERS[::4])
_POINTS = {True: 60, False: 9}
"""Rounds at which epsilon is computed, where that is cheap (Gaussian releases alone) and where it is not."""


@dataclass(frozen=True)
class Spent:
    """Epsilon after some of the rounds at the statement's delta, by composing what the ledger charged for the promised scope.

    Args:
        most: (round from 1, epsilon) of the client that spent most, or of the aggregate. median: of the median client, server
            view only. releases: how many. problem: why there are no points, or why epsilon is inf.
    """

    most: list[tuple[int, float]] = field(default_factory=list)
    median: list[tuple[int, float]] = field(default_factory=list)
    releases: int = 0
    problem: str = ""


def spent(
    ledger: Path,
    scope: Scope,
    delta: float,
    clients: int,
    progress: Callable[[int, int], None] | None = None,
    verified: str = "",
) -> Spent:
    """Epsilon over rounds from a ledger file; a ledger that cannot be trusted gives its problem and no number.

    Args:
        clients: all clients, whether or not they released anything. progress: called with the rows verified, and all.
        verified: the closing digest of a ledger that was verified a moment ago, as of `Ledger.open`.
    """
    if not ledger.is_file():
        return Spent(problem="the run directory has no ledger")
    try:
        with Ledger.open(ledger, read_only=True, progress=progress, verified=verified) as book:
            return _over_rounds(book, scope, delta, clients)
    except LedgerError as error:
        return Spent(problem=str(error))


def _over_rounds(book: Ledger, scope: Scope, delta: float, clients: int) -> Spent:
    kinds = dict[Event, int]()  # of releases that are not plain Gaussian
    each_round, each_client, each_kind, each_square = array("q"), array("q"), array("q"), array("d")
    for t, client, event in charged(book, scope):
        kind, square = (
            (-1, event.count * event.mu**2) if isinstance(event, Gaussian) else (kinds.setdefault(event, len(kinds)), 0.0)
        )
        for column, value in ((each_round, t), (each_client, client), (each_kind, kind)):
            column.append(value)
        each_square.append(square)
    if not each_round:
        return Spent(problem=f"the ledger charged nothing for the promised scope ({scope})")
    order = np.argsort(each_round, kind="stable")
    rounds, squares, of_kind = np.array(each_round)[order], np.array(each_square)[order], np.array(each_kind)[order]
    numbers, places = np.unique(np.array(each_client)[order], return_inverse=True)
    cheap, curves = not kinds, np.array([rdp_curve(event, _ORDERS, adjacency=scope.adjacency) for event in kinds])
    totals, active = np.zeros(len(numbers)), np.zeros(len(numbers), dtype=bool)
    by_order = np.zeros((len(numbers), len(_ORDERS)))
    most, median, reason, done = [], [], "", 0

    def epsilon(place: int, t: int) -> float:
        if cheap:
            return epsilon_of(math.sqrt(totals[place]), delta)
        return bound(charged_to(book, scope, int(numbers[place]), t), delta, adjacency=scope.adjacency)[0]

    for t in _spaced(np.unique(rounds).tolist(), _POINTS[cheap]):
        new = slice(done, done := int(np.searchsorted(rounds, t, side="right")))
        np.add.at(totals, places[new], squares[new])
        active[places[new]] = True
        if not cheap:
            sampled = of_kind[new] >= 0
            np.add.at(by_order, places[new][sampled], curves[of_kind[new][sampled]])
        among = np.flatnonzero(active)
        costs = totals if cheap else _by_renyi(totals, by_order, delta)
        top = int(among[np.argmax(costs[among])])
        most.append((t + 1, epsilon(top, t)))
        if numbers[0] >= 0:
            idle, middle = clients - len(among), (clients - 1) // 2
            ranked = among[np.argsort(costs[among], kind="stable")]
            median.append((t + 1, 0.0 if middle < idle else epsilon(int(ranked[middle - idle]), t)))
        if math.isinf(most[-1][1]) and not cheap:
            events = charged_to(book, scope, int(numbers[top]), t)
            reason = next((e.reason for e in events if isinstance(e, Unbounded)), "")
    return Spent(most, median, len(rounds), reason)


def _spaced(rounds: list[int], points: int) -> list[int]:
    """Choose some of the ascending rounds, evenly spaced, including the last."""
    count = min(points, len(rounds))
    return sorted({rounds[round(i * (len(rounds) - 1) / max(1, count - 1))] for i in range(count)} | {rounds[-1]})


def _by_renyi(squares: NDArray[np.float64], by_order: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """Return epsilon of each client by Renyi accounting at a few orders, to rank clients by spending."""
    curves = squares[:, None] * (_ORDERS / 2) + by_order
    return np.asarray(rdp_epsilons(np.broadcast_to(_ORDERS, curves.shape), curves, delta).min(axis=1), dtype=np.float64)


_WORST_FIRST = ("contradicted", "cannot tell", "verified")


def outcome_values(checked: Mapping[Path, Verification]) -> dict[str, Any] | None:
    """Return the worst outcome of these runs, their contradictions, and the findings of each; None without runs."""
    if not checked:
        return None
    outcomes = [found.outcome for found in checked.values()]
    worst = next(outcome for outcome in _WORST_FIRST if outcome in outcomes)
    found = {path: lines_by_kind(one) for path, one in checked.items()}
    several = len(checked) > 1
    return {
        "outcome": worst,
        "count": f" ({outcomes.count(worst)} of {len(outcomes)} runs)" if several else "",
        "contradictions": [
            f"{f'{printable(path.name)}: ' * several}{line}"
            for path, lines in found.items()
            for line in lines.get("contradicted", [])
        ],
        "runs": [
            {"headline": headline(path.name, one), "kinds": [[TITLES[kind], lines] for kind, lines in found[path].items()]}
            for path, one in checked.items()
        ],
    }


def outcome_lines(checked: Mapping[Path, Verification]) -> list[str]:
    """Return the outcome and the contradictions as lines of text."""
    values = outcome_values(checked)
    if values is None:
        return []
    return [
        f"Verification: {values['outcome']}{values['count']}.",
        *(f"Contradicted: {line}" for line in values["contradictions"]),
    ]


Values = dict[str, Any]
SEES = {
    View.SERVER: "sees every upload",
    View.AGGREGATE: "sees every round's aggregate",
    View.FINAL: "sees the last model only",
}
_UNBOUNDED = "no bound"


def _sees(s: Statement, view: View) -> str:
    """Describe what the adversary of a view sees; with masks, the server sees single uploads only with all others' help."""
    masked = s.shares is not None and s.shares.masks != "none" and view is View.SERVER
    return "is the server with all other clients on its side" if masked else SEES[view]


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
        "cards": _cards(s),
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
    """Return the guarantee in one sentence, as pieces of text and whether they are bold."""
    who = _sees(s, s.own.view)
    if math.isinf(s.proven.epsilon):
        return [(f"Against an attacker who {who}, ", False), ("nothing is proven", True), (f": {s.proven.reason}.", False)]
    what = "a given client's contribution" if s.scope.unit is Unit.CLIENT else "the use of a given record"
    start = f"An attacker who {who}, and accuses wrongly at most 5 % of the time, detects {what} "
    return [(start, False), (f"at most {percent_at_most(s.own.tpr)}", True), (" of the time.", False)]


def card_of(title: str, value: str, order: float | None, *lines: str) -> Values:
    """Return one large number with its small print; `order` sorts the table of several runs."""
    return {"title": title, "value": value, "order": order, "lines": [line for line in lines if line]}


def _cards(s: Statement) -> Values:
    """Return the numbers of a statement that have a value, by their kind, the most important first."""
    cards = {
        "proven": _proven(s),
        "attack": _best_attack(s),
        "open": _not_protected(s),
        "claimed": _claimed(s.claimed),
        "audited": _audited(s),
    }
    return {kind: card for kind, card in cards.items() if card is not None}


def _proven(s: Statement) -> Values:
    why = s.proven.reason or f"accountant: {s.accountant}"
    return card_of("Proven ε", _epsilon(s.proven.epsilon), s.proven.epsilon, scope_line(s), why, if_seen(s.own))


def _best_attack(s: Statement) -> Values | None:
    if math.isinf(s.proven.epsilon):
        return None
    whom = "a given client" if s.scope.unit is Unit.CLIENT else "a given record"
    lines = (f"Detects {whom} at most so often, at 5 % false alarms.", "Guessing: 5 %.", f"The attacker {_sees(s, s.own.view)}.")
    return card_of("Best possible attack", percent_at_most(s.own.tpr), s.own.tpr, *lines)


def _not_protected(s: Statement) -> Values | None:
    unproven = [_sees(s, view.view) for view in s.views if math.isinf(view.proven.epsilon) and view is not s.own]
    names = [text.partition(":")[0] for text in s.not_protected]
    if not names:
        return None
    nobody = f"Nothing is proven against an attacker who {' or '.join(unproven)}." if unproven else ""
    return card_of("Not protected", f"{len(names)} limits", None, nobody, f"{capital('; '.join(names))}.")


def _claimed(claim: Claim | None) -> Values | None:
    if claim is None:
        return None
    value = epsilon(claim.epsilon, _UNBOUNDED, number)
    return card_of("Claimed ε", value, claim.epsilon, f"delta = {small(claim.delta)}, {claim.scope}", claim.source)


def _audited(s: Statement) -> Values | None:
    audit: Audit | None = max((v.audited for v in s.views if v.audited), key=lambda a: (a.rigorous, a.epsilon), default=None)
    if audit is None:
        return None
    sign, how = ("≥", "at least") if audit.rigorous else ("≈", "estimated")
    value = f"{sign} {epsilon(audit.epsilon, '∞', at_least)}"
    return card_of("Audited ε", value, audit.epsilon, f"delta = {small(audit.delta)}, {audit.scope}", f"{how}, {audit.how}")


def capital(text: str) -> str:
    """Return the text with a capital letter at its beginning."""
    return text[:1].upper() + text[1:]


def _with_who(s: Statement, among: Sequence[Statement]) -> TextTable:
    """Return the table of views, with what each of them sees."""
    table = numbers_table(s, among, _UNBOUNDED)
    rows = ((first, TextCell(_sees(s, v.view)), *others) for v, (first, *others) in zip(s.views, table.rows, strict=True))
    first, *others = table.headings
    return replace(table, headings=(first, "who", *others), rows=tuple(rows))


def _epsilon(value: float) -> str:
    return epsilon(value, _UNBOUNDED)


def spent_values(
    runs: Sequence[RunData],
    progress: Callable[[int, int], None] | None = None,
    checked: Mapping[Path, Verification] | None = None,
) -> Values | None:
    """Return epsilon over the rounds, from the ledger; for several runs, of the one that spent most."""
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
    """Return epsilon after the last round; if it is unknown, a number below all others."""
    return found.most[-1][1] if found.most else -1.0
