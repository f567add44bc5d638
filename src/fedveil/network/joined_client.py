"""A client that has joined: it answers offers by its consent, and rounds of the runs that it consented to.

What it agreed to is pinned on its disk, by run. Another configuration under the same name is refused, also after a restart.

    FOLDER/lifetime-VIEW.sqlite   what all its runs cost (see `client_ledger`)
    FOLDER/runs/RUN/offer.json    what it consented to; ledger.sqlite: its releases; states/: what it keeps
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil import __version__
from fedveil.accounting.formatting import at_most
from fedveil.errors import FedveilError
from fedveil.federation.plain_state import sync_folder, write_whole
from fedveil.flower.client_node import ClientNode
from fedveil.flower.client_states import ClientStates
from fedveil.flower.flower_messages import printable
from fedveil.flower.round_messages import TaskMessage, read_task
from fedveil.flower.wire_format import WireError
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.ledger_head import head_path
from fedveil.ledger.owner_only import owner_only_folder
from fedveil.methods.method import participation_of
from fedveil.network.client_ledger import ClientLedger
from fedveil.network.consent import Consent, ConsentRefused, Judged, judged, judged_in_time, require_noise, require_price
from fedveil.network.deployed_data import no_part, own_part
from fedveil.network.offers import ONLY_LOOKS, Offer, consent_bytes, read_offer, refusal_bytes
from fedveil.run.assembly import federation
from fedveil.run.rehearsal import rehearsed
from fedveil.run.run_lock import claimed
from fedveil.statement.statement_markdown import to_markdown

if TYPE_CHECKING:
    from fedveil.mechanism.plan import Plan, Raw
    from fedveil.run.assembly import Prepared
    from fedveil.run.experiment import Experiment

_log = logging.getLogger(__name__)


class JoinedClient:
    """One client, for all runs that a server asks it for.

    Args:
        folder: its own, of mode 700. consent: what it agrees to. tell: called with a line for each thing that happens.
        check: show what is offered, and refuse it; `fits` says then whether this client would take part with all of its data.
    """

    def __init__(
        self, folder: Path, consent: Consent, tell: Callable[[str], None] = lambda line: None, *, check: bool = False
    ) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder, self.consent, self.tell, self.check = owner_only_folder(folder), consent, tell, check
        self.has_looked, self.fits = False, False
        self._refused: dict[str, str] = {}
        self.ledger = ClientLedger(folder, consent)
        self._nodes: dict[str, ClientNode] = {}

    def answer(self, parts: list[bytes]) -> bytes:
        """The answer to a message: one part is an offer, two are a round.

        Of all processes with this folder one answers at a time: what was consented to and answered before lies in it. An offer is
        judged before, so that one which takes long keeps nobody up.

        Raises:
            WireError: it is neither, or of a run that this client has not consented to.
        """
        if (size := sum(map(len, parts))) > (most := self.consent.limits.message):
            raise WireError(f"a message has at most {most} bytes at this client (limits.parameters), this one has {size}")
        if len(parts) == 1:
            return self._answer_offer(read_offer(parts[0]))
        if len(parts) != 2:
            raise WireError("a message has one part or two")
        task = read_task(parts[1])
        with claimed(self.folder, wait=True):
            answer = self._node(task).answer(*parts)
        self.tell(f"run {task.run}, round {task.round}: answered with {len(answer)} bytes")
        return answer

    def consented(self, offer: Offer) -> float:
        """Judge an offer, and pin it; returns the epsilon that the client has certified.

        The client's examples are not looked at: what is answered costs nothing, and so must not depend on them.

        Raises:
            FedveilError: it is refused, with the reason; nothing was charged.
        """
        if offer.fedveil != __version__:
            raise ConsentRefused(
                f"the server has fedveil {printable(offer.fedveil)}, and this client {__version__}: install the same version on "
                f"both sides"
            )
        self._require_unchanged(offer)
        accepted = judged_in_time(self.consent, offer.parsed())
        with claimed(self.folder, wait=True):
            return self._admitted(accepted, offer, self._require_unchanged(offer))

    def _require_unchanged(self, offer: Offer) -> bool:
        """Whether the client consented to the offer before; raises ConsentRefused where that was another one of its name."""
        pinned = self._pinned(offer.run)
        if pinned is not None and pinned.digest != offer.digest:
            raise ConsentRefused(f"the configuration of run {offer.run} has changed since this client consented to it")
        return pinned is not None

    def _admitted(self, accepted: Judged, offer: Offer, pinned: bool) -> float:
        """Pin and charge an offer that was judged; returns its epsilon."""
        if offer.client >= accepted.setting.clients:
            raise ConsentRefused(f"client {offer.client} of {accepted.setting.clients}: there is no such number")
        if self.consent.data.part is not None and self.consent.data.part != offer.client:
            raise ConsentRefused(f"this client has part {self.consent.data.part} of the data, not part {offer.client}")
        if self.check:
            self.fits = self._look(accepted, offer)
            raise ConsentRefused("it is within this client's consent, which only looks at it (--check)")
        if not pinned:
            self.ledger.require_unknown(accepted, offer.run)
            self.ledger.check(accepted, offer.run, offer.client)
            self._pin(offer)
        self.ledger.admit(accepted, offer.run, offer.client)  # after the pin: the run was charged for this configuration alone
        return accepted.statement.proven.epsilon

    def _answer_offer(self, offer: Offer) -> bytes:
        try:
            epsilon = self.consented(offer)
        except FedveilError as problem:
            why = printable(problem.__cause__ or problem)  # the cause stays here
            if problem.__cause__ is not None and str(problem) != why:
                why = f"{why} ({printable(problem)})"
            if self._refused.get(offer.run) != why:  # it is offered again and again
                self.tell(f"run {offer.run}: {'' if self.check else 'refused: '}{why}")
            self._refused[offer.run], self.has_looked = why, self.check
            return refusal_bytes(offer, ONLY_LOOKS if self.check else str(problem))
        except Exception:  # whose words may tell of the data
            _log.exception("the offer of run %s", offer.run)
            return refusal_bytes(offer, "an error at the client, which its own log describes")
        self.tell(f"run {offer.run}: consented as client {offer.client}, epsilon = {at_most(epsilon)}")
        return consent_bytes(offer, epsilon)

    def _node(self, task: TaskMessage) -> ClientNode:
        if task.run not in self._nodes:
            offer = self._pinned(task.run)
            if offer is None:
                raise WireError(f"a round of run {task.run}, to which this client has not consented")
            self._nodes[task.run] = self._made(offer)
        return self._nodes[task.run]

    def _made(self, offer: Offer) -> ClientNode:
        folder, accepted = self._run_folder(offer.run), judged(self.consent, offer.parsed())
        experiment = accepted.experiment
        path = folder / "ledger.sqlite"
        if not path.exists() and not head_path(path).exists():
            Ledger.create(path, offer.run, {"offer": offer.digest}).close()
        population = self.ledger.admit(accepted, offer.run, offer.client)
        try:
            own = self._own(offer, experiment)
            network = rehearsed(experiment, own, whole=False)  # the server has rehearsed a round
            job = federation(experiment, own, path, offer.run, network, population)
        except Exception as problem:  # of the data: whether they can be read is theirs to keep, and goes into the noise
            _log.info("the data of run %s", offer.run, exc_info=True)
            why = printable(problem)
            self.tell(f"run {offer.run}: this client releases zero and noise: its data are not as the configuration says: {why}")
            own = no_part(experiment)
            network = rehearsed(experiment, own, whole=False)
            job = federation(experiment, own, path, offer.run, network, population)
        states = ClientStates(folder / "states")

        def require(plan: Plan | Raw) -> None:
            require_noise(self.consent, accepted.setting, plan)
            require_price(accepted, plan)

        rule = participation_of(accepted.method, accepted.setting)
        return ClientNode(job.context, offer.run, offer.client, states, accepted.setting.rounds, require, rule)

    def _own(self, offer: Offer, experiment: Experiment) -> Prepared:
        data = self.consent.data

        def tell(line: str) -> None:
            self.tell(f"run {offer.run}: {line}")

        return own_part(experiment, offer.client, data.file, tell, part=data.part is not None)

    def _look(self, accepted: Judged, offer: Offer) -> bool:
        """Tell the operator what consenting would mean, and whether the data fit; raises ConsentRefused beyond the lifetime."""
        self.tell(to_markdown(accepted.statement))
        self.ledger.check(accepted, offer.run, offer.client)
        try:
            self._own(offer, accepted.experiment)
        except FedveilError as problem:
            self.tell(f"run {offer.run}: this client's data are not as the configuration says: {printable(problem)}")
            return False
        return True

    def _pin(self, offer: Offer) -> None:
        """Keep the offer; when this returns, it is on the disk."""
        folder, kept = self._run_folder(offer.run), {"run": offer.run, "client": offer.client, "config": offer.config}
        write_whole(folder / "offer.json", json.dumps(kept).encode())
        for listed in (folder, folder.parent, self.folder):
            sync_folder(listed)

    def _run_folder(self, run: str) -> Path:
        return owner_only_folder(owner_only_folder(self.folder / "runs") / run)

    def _pinned(self, run: str) -> Offer | None:
        path = self.folder / "runs" / run / "offer.json"
        if not path.exists():
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Offer(kept["run"], kept["client"], kept["config"])
