"""The ledgers of one client over its lifetime.

In the server view each release is charged to the run's ledger and to the lifetime when it is sent. In the aggregate view the
client sees no release, because noise is added to the sums. So it charges the whole plan when it consents, and its ledger states
whom it trusts for that. With secure aggregation the plan has spare attempts, and each attempt that the client answers is one of
its releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.accounting.types import Gaussian, Scope, Unbounded, View
from fedveil.deploy.consent import AcceptedRun, Consent, ConsentRefused
from fedveil.errors import BudgetExhausted, ConfigError, FedveilError, LedgerError
from fedveil.experiment.shared_budget import planned_charges
from fedveil.experiment.two_ledgers import ITSELF, MASKED, TRUSTS
from fedveil.ledger.filters import best_order
from fedveil.ledger.ledger import AGGREGATE, Entry, Ledger
from fedveil.ledger.population_budget import PopulationBudget, lifetime_budget

if TYPE_CHECKING:
    from fedveil.accounting.types import Event
    from fedveil.ledger.budgeted_ledger import BudgetedLedger


_SPENT = (
    "the run costs more privacy than this client's consent still allows ([lifetime] in its consent.toml); its log says how much"
)
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
            path = self.folder / f"lifetime-{view}.sqlite"  # processes that share the folder answer one at a time
            return lifetime_budget(path, cap.epsilon, cap.delta, scope, cap.order, alone=True)
        except FedveilError as problem:  # its text describes this machine
            raise ConsentRefused(_RECORD) from problem

    def require_unknown(self, judged: AcceptedRun, run: str) -> None:
        """Refuse a run that was charged for an offer which is gone; otherwise another offer could be used at its price.

        Raises:
            ConsentRefused: the lifetime has rows of that run.
        """
        with _refusals():
            charged = self._charged(self.budget(judged.setting.scope.view), run)
        if charged:
            raise ConsentRefused(
                f"this client has charged a run {run} before, and its record of the consent is gone: give the run another name"
            )

    def check(self, judged: AcceptedRun, run: str, client: int) -> None:
        """Check that the run's whole plan still fits, without charging it.

        Raises:
            ConsentRefused: it does not fit.
        """
        budget, planned, number = self._plan(judged, client)
        with _refusals(self._order_hint(judged, planned)):
            budget.check_plan(planned, run, (number,))

    def admit(self, judged: AcceptedRun, run: str, client: int) -> BudgetedLedger:
        """Check that the run's whole plan still fits, and charge it if the client cannot charge each release.

        Returns:
            The ledger to which releases of the run are charged.

        Raises:
            ConsentRefused: it does not fit; nothing was charged.
        """
        budget, planned, number = self._plan(judged, client)
        with _refusals(self._order_hint(judged, planned)):
            budget.check_plan(planned, run, (number,))
            ledger = budget.ledger(run, number)
            if number == AGGREGATE and not self._charged(budget, run):
                ledger.charge_all([_planned(judged, run, event) for event in planned])
        return ledger

    def _plan(self, judged: AcceptedRun, client: int) -> tuple[PopulationBudget, Sequence[Event], int]:
        """Return the lifetime that a run is charged to, its planned releases, and the client number of the charges."""
        view = judged.setting.scope.view
        number = ITSELF if view is View.SERVER else AGGREGATE
        return self.budget(view), planned_charges(judged.method, judged.setting.of(client)), number

    def _order_hint(self, judged: AcceptedRun, planned: Sequence[Event]) -> str:
        """Return a hint to the consent's key for secret samples, if it does not suit the run; else an empty string."""
        view = judged.setting.scope.view
        cap, sampled = self.consent.lifetime[view], [event for event in planned if not isinstance(event, Unbounded)]
        key, secret = f"lifetime.{view}.order", not all(isinstance(event, Gaussian) for event in sampled)
        if secret == (cap.order is not None):
            return ""
        if not secret:
            return f". Its consent sets {key}, which is for runs that sample in secret: this one costs less without it"
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


def _planned(judged: AcceptedRun, run: str, event: Event) -> Entry:
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
        note=MASKED if s.secure_aggregation == "on" else TRUSTS,
    )
