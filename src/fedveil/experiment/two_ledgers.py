"""The ledger of a run held against that of a client that took part on a machine of its own.

Rows of a client's ledger without a counterpart at the server are no contradiction: a release is charged before it is sent, so it
may have been lost on the way, or have come too late. A row at the server that the client does not have is one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.accounting.types import Unbounded, View
from fedveil.errors import FedveilError
from fedveil.ledger.budgeted_ledger import named_bits
from fedveil.ledger.ledger import AGGREGATE, Entry, Ledger
from fedveil.ledger.population_budget import open_budget, percent
from fedveil.methods.run_cost import ROUNDING
from fedveil.verify import Finding

if TYPE_CHECKING:
    from fedveil.ledger.population_budget import Cap

ITSELF = 0
"""The number under which a client counts itself, whatever its number in a run."""
TRUSTS = "planned in full at consent; trusts the server to draw who takes part, and to add the noise"
MASKED = "planned in full at consent, with spare attempts; the server sees masked sums alone"
SUBJECT, _LIFETIME = "two ledgers", "the client's lifetime"


@dataclass(frozen=True)
class _ClientSide:
    """A client's records of one run: its number, its releases, and its charges to the lifetime."""

    number: int
    releases: Sequence[Entry]
    lifetime: Sequence[Entry]
    cap: Cap


def compared(run: Path, client: Path) -> list[Finding]:
    """Hold the ledger of a run directory against that of a client.

    Args:
        client: the client's folder (`fedveil join --dir`).
    """
    try:
        with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
            name, server = ledger.run, [entry for _, _, entry in ledger.entries()]
        if not server:
            return [Finding("unknown", SUBJECT, "the server's ledger holds no release yet")]
        view = server[0].view
        there = _client_side(client, name, view)
    except (FedveilError, OSError, ValueError, KeyError) as problem:
        return [Finding("unknown", SUBJECT, f"not both can be read: {problem}")]
    if view is not View.SERVER:
        return [_planned_finding(server, there)]
    return [_release_finding(server, there), _lifetime_finding(there)]


def _client_side(folder: Path, run: str, view: View) -> _ClientSide:
    offer = folder / "runs" / run / "offer.json"
    if not offer.exists():
        others = ", ".join(sorted(path.parent.name for path in folder.glob("runs/*/offer.json"))) or "none"
        raise FedveilError(f"{folder} holds nothing of run {run}; its runs: {others}")
    path = folder / f"lifetime-{view}.sqlite"
    budget = open_budget(path)
    own = _rows(offer.with_name("ledger.sqlite")) if view is View.SERVER else []
    spent = [entry for entry in _rows(path) if entry.run == run]
    return _ClientSide(json.loads(offer.read_text(encoding="utf-8"))["client"], own, spent, budget.cap)


def _rows(path: Path) -> list[Entry]:
    with Ledger.open(path, read_only=True) as ledger:
        return [entry for _, _, entry in ledger.entries()]


def _release_finding(server: Sequence[Entry], there: _ClientSide) -> Finding:
    """Server view: row by row, all but the number of participants, which a published ledger leaves out."""
    theirs = Counter(replace(e, participants=None) for e in server if e.client == there.number)
    own = Counter(replace(e, participants=None) for e in there.releases)
    whose = f"client {there.number}"
    missing, only = list((theirs - own).elements()), list((own - theirs).elements())
    bits = {(e.round, named_bits(e)): e for e in only}
    for entry in missing:
        if (entry.round, named_bits(entry)) in bits:
            other = bits[entry.round, named_bits(entry)]
            return Finding("contradicted", SUBJECT, f"{whose}, {_named(entry)}: {_difference(entry, other)}")
    if missing:
        text = f"the server charged {whose} with {_listed(missing)}, which the client's ledger does not have"
        return Finding("contradicted", SUBJECT, text)
    if only:
        text = f"{whose} charged {_listed(only)}, which the server's ledger does not have: lost on the way, or come too late"
        return Finding("unknown", SUBJECT, text)
    return Finding("verified", SUBJECT, f"{own.total()} releases of {whose}, the same bits at the same charge")


def _difference(server: Entry, client: Entry) -> str:
    fields = [k for k, v in vars(server).items() if v != getattr(client, k)]
    return "; ".join(f"{k} is {getattr(server, k)} at the server and {getattr(client, k)} at the client" for k in fields)


def _lifetime_finding(there: _ClientSide) -> Finding:
    """Check that each release in the client's ledger of the run was also charged to its lifetime."""
    own = Counter((e.round, e.event, e.note) for e in there.releases)
    spent = Counter((e.round, e.event, e.note) for e in there.lifetime if e.client == ITSELF)
    missing = own - spent
    if missing:
        return Finding("contradicted", _LIFETIME, f"{missing.total()} of {own.total()} releases were not charged to it")
    more = (spent - own).total()
    never = f", and {more} more that never left (charged before a crash)" if more else ""
    return Finding("verified", _LIFETIME, f"{own.total()} releases of this run were charged to it{never}")


def _planned_finding(server: Sequence[Entry], there: _ClientSide) -> Finding:
    """Aggregate view: the sums cost no more than the client charged at consent."""
    planned = [entry for entry in there.lifetime if entry.client == AGGREGATE and entry.note in (TRUSTS, MASKED)]
    if any(isinstance(entry.event, Unbounded) for entry in server):
        return Finding("contradicted", SUBJECT, "the server released a sum of unbounded cost, and the client consented to none")
    spent, agreed = _cost(server, there.cap), _cost(planned, there.cap)
    said = f"{len(server)} sums cost {percent(spent / there.cap.limit)} of the client's lifetime"
    if spent > agreed * (1 + Fraction(ROUNDING)):
        return Finding("contradicted", SUBJECT, f"{said}, and the client charged {percent(agreed / there.cap.limit)} at consent")
    return Finding("verified", SUBJECT, f"{said}, of {percent(agreed / there.cap.limit)} that the client charged at consent")


def _cost(entries: Iterable[Entry], cap: Cap) -> Fraction:
    return sum((cap.cost(entry.event, entry.adjacency) for entry in entries), Fraction(0))


def _listed(entries: Sequence[Entry]) -> str:
    named = ", ".join(_named(entry) for entry in sorted(entries, key=lambda e: e.round)[:5])
    return f"{len(entries)} release{'s' * (len(entries) > 1)} ({named}{', ...' * (len(entries) > 5)})"


def _named(entry: Entry) -> str:
    return f"round {entry.round}, sha256 {named_bits(entry)[:12] or 'not named'}"
