"""The ledgers of one client over its lifetime, and a comparison with the server's ledger.

In the server view each release is charged to the run's ledger and to the lifetime when it is sent. In the aggregate view the
client sees no release, because noise is added to the sums. So it charges the whole plan when it consents, and its ledger states
whom it trusts for that.

Rows that only the client's ledger has are not a contradiction: a release is charged before it is sent, so it may have been lost
or late. A row that only the server's ledger has is one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.accounting.types import Gaussian, Scope, Unbounded, View
from fedveil.deploy.consent import Consent, ConsentRefused, Judged
from fedveil.errors import BudgetExhausted, ConfigError, FedveilError, LedgerError
from fedveil.experiment.assembly import planned_charges
from fedveil.ledger.budgeted_ledger import named_bits
from fedveil.ledger.filters import best_order
from fedveil.ledger.ledger import AGGREGATE, Entry, Ledger
from fedveil.ledger.population_budget import PopulationBudget, lifetime_budget, open_budget, percent
from fedveil.methods.run_cost import ROUNDING
from fedveil.verify import Finding

if TYPE_CHECKING:
    from fedveil.accounting.types import Event
    from fedveil.ledger.budgeted_ledger import BudgetedLedger
    from fedveil.ledger.population_budget import Cap


ITSELF = 0
"""Number under which a client counts itself, whatever its number in a run."""
TRUSTS = "planned in full at consent; trusts the server to draw who takes part, and to add the noise"
_SPENT = "the run plans more than is left of this client's lifetime; its own log tells how much"
_RECORD = "this client's own record of its lifetime does not allow it; its own log tells why"


class ClientLedger:
    """Lifetime ledgers of one client.

    Args:
        folder: of the ledgers, which are created when first needed. consent: has the caps.
    """

    def __init__(self, folder: Path, consent: Consent) -> None:
        self.folder, self.consent = folder, consent

    def budget(self, view: View) -> PopulationBudget:
        """Return the lifetime budget in that view.

        Raises:
            ConsentRefused: the consent has another cap than the ledger was created with.
        """
        cap = self.consent.lifetime[view]
        scope = Scope(self.consent.unit, self.consent.adjacency, view)
        try:
            return lifetime_budget(self.folder / f"lifetime-{view}.sqlite", cap.epsilon, cap.delta, scope, cap.order)
        except FedveilError as problem:  # its text describes this machine
            raise ConsentRefused(_RECORD) from problem

    def require_unknown(self, judged: Judged, run: str) -> None:
        """Refuse a run that was charged for an offer which is gone; otherwise another offer could be used at its price.

        Raises:
            ConsentRefused: the lifetime has rows of that run.
        """
        with _refusals():
            charged = self._charged(self.budget(judged.setting.scope.view), run)
        if charged:
            raise ConsentRefused(
                f"this client charged a run {run} before and no longer has what it consented to: give the run another name"
            )

    def check(self, judged: Judged, run: str, client: int) -> None:
        """Check that the run's whole plan still fits, without charging it.

        Raises:
            ConsentRefused: it does not fit.
        """
        budget, planned, number = self._plan(judged, client)
        with _refusals(self._without_order(judged, planned)):
            budget.check_plan(planned, run, (number,))

    def admit(self, judged: Judged, run: str, client: int) -> BudgetedLedger:
        """Check that the run's whole plan still fits, and charge it if the client cannot charge each release.

        Returns:
            The ledger to which releases of the run are charged.

        Raises:
            ConsentRefused: it does not fit; nothing was charged.
        """
        budget, planned, number = self._plan(judged, client)
        with _refusals(self._without_order(judged, planned)):
            budget.check_plan(planned, run, (number,))
            ledger = budget.ledger(run, number)
            if number == AGGREGATE and not self._charged(budget, run):
                ledger.charge_all([_planned(judged, run, event) for event in planned])
        return ledger

    def _plan(self, judged: Judged, client: int) -> tuple[PopulationBudget, Sequence[Event], int]:
        """Return the lifetime that a run is charged to, its planned releases, and the client number of the charges."""
        view = judged.setting.scope.view
        number = ITSELF if view is View.SERVER else AGGREGATE
        return self.budget(view), planned_charges(judged.method, judged.setting.of(client)), number

    def _without_order(self, judged: Judged, planned: Sequence[Event]) -> str:
        """Return a hint to the consent's key for secret samples, if it is missing and the run has some; else an empty string."""
        view = judged.setting.scope.view
        cap, sampled = self.consent.lifetime[view], [event for event in planned if not isinstance(event, Unbounded)]
        if cap.order is not None or all(isinstance(event, Gaussian) for event in sampled):
            return ""
        key = f"lifetime.{view}.order"
        with suppress(ConfigError):
            key += f" = {best_order(cap.epsilon, cap.delta, sampled, judged.setting.scope.adjacency):g}"
        return (
            f". Its consent leaves lifetime.{view}.order out, which counts secret samples as if everybody took part "
            f"each time; with {key} they count as they are"
        )

    def _charged(self, budget: PopulationBudget, run: str) -> bool:
        with Ledger.open(budget.path) as ledger:
            return any(entry.run == run for _, _, entry in ledger.entries())


@contextmanager
def _refusals(hint: str = "") -> Iterator[None]:
    """Tell the server only that a lifetime does not allow a run, and a hint to a fix."""
    try:
        yield
    except BudgetExhausted as refusal:  # its text describes other runs
        raise ConsentRefused(_SPENT + hint) from refusal
    except LedgerError as problem:
        raise ConsentRefused(_RECORD) from problem


def _planned(judged: Judged, run: str, event: Event) -> Entry:
    """Return the row for all planned releases of one kind."""
    s = judged.setting
    assert not isinstance(event, Unbounded)
    d, layers = s.layout.dimension, len(s.layout)
    clip = judged.method.clip_norm(s) or 0.0
    return Entry(
        run=run,
        round=0,
        client=AGGREGATE,
        unit=s.scope.unit,
        adjacency=s.scope.adjacency,
        view=s.scope.view,
        event=event,
        clip=(clip,) * layers,
        noise_std=(clip * s.z,) * layers,
        coordinates=d,
        dimension=d,
        participants=s.cohort,
        note=TRUSTS,
    )


SUBJECT, LIFETIME = "two ledgers", "the client's lifetime"


@dataclass(frozen=True)
class ClientSide:
    """A client's records of one run: its number, its releases, and its charges to its lifetime."""

    number: int
    releases: Sequence[Entry]
    lifetime: Sequence[Entry]
    cap: Cap


def compared(run: Path, client: Path) -> list[Finding]:
    """Compare the ledger of a run directory with that of a client.

    Args:
        client: the client's folder (`fedveil join --dir`).
    """
    try:
        with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
            name, server = ledger.run, [entry for _, _, entry in ledger.entries()]
        if not server:
            return [Finding("unknown", SUBJECT, "the server's ledger holds no release yet")]
        view = server[0].view
        client_side = _client_side(client, name, view)
    except (FedveilError, OSError, ValueError, KeyError) as problem:
        return [Finding("unknown", SUBJECT, f"not both can be read: {problem}")]
    if view is not View.SERVER:
        return [_planned_finding(server, client_side)]
    return [_release_finding(server, client_side), _lifetime_finding(client_side)]


def _client_side(folder: Path, run: str, view: View) -> ClientSide:
    offer = folder / "runs" / run / "offer.json"
    if not offer.exists():
        others = ", ".join(sorted(path.parent.name for path in folder.glob("runs/*/offer.json"))) or "none"
        raise FedveilError(f"{folder} holds nothing of run {run}; its runs: {others}")
    path = folder / f"lifetime-{view}.sqlite"
    budget = open_budget(path)
    releases = _rows(offer.with_name("ledger.sqlite")) if view is View.SERVER else []
    spent = [entry for entry in _rows(path) if entry.run == run]
    return ClientSide(json.loads(offer.read_text(encoding="utf-8"))["client"], releases, spent, budget.cap)


def _rows(path: Path) -> list[Entry]:
    with Ledger.open(path, read_only=True) as ledger:
        return [entry for _, _, entry in ledger.entries()]


def _release_finding(server: Sequence[Entry], side: ClientSide) -> Finding:
    """Compare the ledgers row by row (server view), except the number of participants, which a published ledger omits."""
    theirs = Counter(replace(e, participants=None) for e in server if e.client == side.number)
    own = Counter(replace(e, participants=None) for e in side.releases)
    whose = f"client {side.number}"
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


def _lifetime_finding(side: ClientSide) -> Finding:
    """Check that each release in the client's run ledger was charged to its lifetime."""
    own = Counter((e.round, e.event, e.note) for e in side.releases)
    spent = Counter((e.round, e.event, e.note) for e in side.lifetime if e.client == ITSELF)
    missing = own - spent
    if missing:
        return Finding("contradicted", LIFETIME, f"{missing.total()} of {own.total()} releases were not charged to it")
    more = (spent - own).total()
    never = f", and {more} more that never left (charged before a crash)" if more else ""
    return Finding("verified", LIFETIME, f"{own.total()} releases of this run were charged to it{never}")


def _planned_finding(server: Sequence[Entry], side: ClientSide) -> Finding:
    """Check that the sums cost no more than the client charged at consent (aggregate view)."""
    planned = [entry for entry in side.lifetime if entry.client == AGGREGATE and entry.note == TRUSTS]
    if any(isinstance(entry.event, Unbounded) for entry in server):
        return Finding("contradicted", SUBJECT, "the server released a sum of unbounded cost, and the client consented to none")
    spent, agreed = _cost(server, side.cap), _cost(planned, side.cap)
    cost = f"{len(server)} sums cost {percent(spent / side.cap.limit)} of the client's lifetime"
    if spent > agreed * (1 + Fraction(ROUNDING)):
        return Finding("contradicted", SUBJECT, f"{cost}, and the client charged {percent(agreed / side.cap.limit)} at consent")
    return Finding("verified", SUBJECT, f"{cost}, of {percent(agreed / side.cap.limit)} that the client charged at consent")


def _cost(entries: Iterable[Entry], cap: Cap) -> Fraction:
    return sum((cap.cost(entry.event, entry.adjacency) for entry in entries), Fraction(0))


def _listed(entries: Sequence[Entry]) -> str:
    named = ", ".join(_named(entry) for entry in sorted(entries, key=lambda e: e.round)[:5])
    return f"{len(entries)} release{'s' * (len(entries) > 1)} ({named}{', ...' * (len(entries) > 5)})"


def _named(entry: Entry) -> str:
    return f"round {entry.round}, sha256 {named_bits(entry)[:12] or 'not named'}"
