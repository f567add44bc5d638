"""A client's process: its data, consent and ledgers, and its answers to offers and rounds.

What the client agreed to is stored on its disk, by run. Another configuration under the same name is refused, also after a
restart.

    FOLDER/lifetime-VIEW.sqlite   the cost of all its runs (see `client_ledger`)
    FOLDER/runs/RUN/offer.json    the accepted offer; ledger.sqlite: its releases; states/: its states
    FOLDER/runs/RUN/receipts.jsonl   what the server signed after each round (see `experiment.receipts`)

The SuperNode carries messages, and runs nothing. It is restarted whenever it ends: the server turns it away (Flower's exit 305)
before the client is admitted, and for a minute after a SuperNode with the same key was lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from subprocess import Popen
from typing import TYPE_CHECKING, Any

from fedveil import __version__
from fedveil.accounting.types import at_most
from fedveil.deploy.client_ledger import ClientLedger
from fedveil.deploy.client_node import ClientNode, ClientStates
from fedveil.deploy.consent import (
    AcceptedRun,
    Consent,
    ConsentRefused,
    check_offer,
    judged_in_time,
    require_noise,
    require_not_ended,
    require_price,
    require_share,
)
from fedveil.deploy.deployed_data import client_data, empty_client_data
from fedveil.deploy.flower_api import Endpoint, TaskQueue, answer_message, bundle, require_fleet_routes
from fedveil.deploy.masked_rounds import MaskedNode
from fedveil.deploy.membership import expiry
from fedveil.deploy.network_folder import check_readable, signing_key
from fedveil.deploy.offers import ONLY_LOOKS, Offer, consent_bytes, read_offer, refusal_bytes
from fedveil.deploy.programs import Program, ended_by_signal, free_port, limit_memory, running
from fedveil.deploy.round_messages import RefusalMessage, TaskMessage, read_task, reply_bytes
from fedveil.deploy.server_clock import clocks_that_differ
from fedveil.deploy.status import notify
from fedveil.deploy.wire_format import WireError, printable
from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.assembly import federation
from fedveil.experiment.receipts import ClientReceipts
from fedveil.experiment.rehearsal import rehearsed
from fedveil.experiment.run_directory import locked
from fedveil.ledger.files import owner_only_folder, replace_whole, sync_path, was_begun
from fedveil.ledger.ledger import Ledger
from fedveil.methods.method import participation_of
from fedveil.statement.statement_layout import to_markdown

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedveil.experiment.assembly import Prepared
    from fedveil.experiment.experiment import Experiment
    from fedveil.mechanism.plan import Plan, Raw


_log = logging.getLogger(__name__)


class JoinedClient:
    """One client, for all runs in which a server asks it.

    Args:
        folder: its own, of mode 700. consent: of the client. tell: called with a line for each event.
        check: show each offer, and refuse it; `fits` is then whether this client would take part with all of its data.
        signing: its key on the roster, for runs with secure aggregation.
    """

    def __init__(
        self,
        folder: Path,
        consent: Consent,
        tell: Callable[[str], None] = lambda line: None,
        *,
        check: bool = False,
        signing: Ed25519PrivateKey | None = None,
    ) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder, self.consent, self.tell, self.check = owner_only_folder(folder), consent, tell, check
        self.signing = signing
        self.has_looked, self.fits, self._unreadable = False, False, ""
        self.last: dict[str, Any] = {}
        self._refused: dict[str, str] = {}
        self.ledger = ClientLedger(folder, consent)
        self._nodes: dict[str, ClientNode | MaskedNode] = {}

    def answer(self, parts: list[bytes]) -> bytes:
        """Return the answer to a message: one part is an offer, two are a round.

        Only one of the processes with this folder answers at a time, because consents and answers are stored in it. An offer is
        checked before, so that a slow check blocks nobody.

        Raises:
            WireError: it is neither, or of a run that this client has not consented to.
        """
        if (size := sum(map(len, parts))) > (most := self.consent.limits.message):
            key = "limits.parameters" if self.consent.limits.message_bytes is None else "limits.message_bytes"
            raise WireError(f"a message has at most {most} bytes at this client ({key}), this one has {size}")
        if len(parts) == 1:
            return self._answer_offer(read_offer(parts[0]))
        if len(parts) != 2:
            raise WireError("a message has one part or two")
        task = read_task(parts[1])
        with locked(self.folder, wait=True):
            try:
                self._require_valid()
                node = self._node(task)
            except ConsentRefused as refusal:
                self.tell(f"run {task.run}, round {task.round}: refused: {refusal}")
                return reply_bytes(RefusalMessage(task, str(refusal)))
            answer = node.answer(*parts)
        self.tell(f"run {task.run}, round {task.round}: answered with {len(answer)} bytes")
        answers = self.last.get("answers", 0) + 1
        self.last = {"state": "took part", "run": task.run, "round": task.round, "answers": answers}
        return answer

    def change_consent(self, consent: Consent | ConfigError) -> None:
        """Follow a changed consent from now on, also in runs that it was asked for before; refuse all while it is an error."""
        if isinstance(consent, ConfigError):
            self._unreadable = str(consent)
            self.tell(f"the changed consent cannot be read, and everything is refused until it can: {consent}")
            return
        self._unreadable, self.consent, self.ledger = "", consent, ClientLedger(self.folder, consent)
        self._nodes.clear()
        self.tell("the consent has changed, and holds from now on; runs that were refused are judged again when they are offered")

    def _require_valid(self) -> None:
        """Refuse everything if the consent has ended, or cannot be read."""
        if self._unreadable:
            raise ConsentRefused("this client's consent cannot be read at the moment; its own log tells why")
        require_not_ended(self.consent)

    def consented(self, offer: Offer) -> float:
        """Check an offer, store it, and return the epsilon that the client has certified.

        The client's examples are not read: the answer costs nothing, so it must not depend on them.

        Raises:
            FedveilError: the offer is refused, with the reason; nothing was charged.
        """
        if offer.fedveil != __version__:
            raise ConsentRefused(
                f"the server has fedveil {printable(offer.fedveil)}, and this client {__version__}: install the same version on "
                f"both sides"
            )
        self._require_valid()
        self._require_unchanged(offer)
        accepted = judged_in_time(self.consent, offer.parsed())
        with locked(self.folder, wait=True):
            return self._admitted(accepted, offer, self._require_unchanged(offer))

    def _require_unchanged(self, offer: Offer) -> bool:
        """Return whether the client consented to the offer before; raise ConsentRefused if that was another with its name."""
        pinned = self._pinned(offer.run)
        if pinned is not None and pinned.digest != offer.digest:
            raise ConsentRefused(f"the configuration of run {offer.run} has changed since this client consented to it")
        return pinned is not None

    def _admitted(self, accepted: AcceptedRun, offer: Offer, pinned: bool) -> float:
        """Store and charge an offer that was checked, and return its epsilon."""
        if offer.client >= accepted.setting.clients:
            raise ConsentRefused(f"client {offer.client} of {accepted.setting.clients}: there is no such number")
        if self.consent.data.part is not None and self.consent.data.part != offer.client:
            raise ConsentRefused(f"this client has part {self.consent.data.part} of the data, not part {offer.client}")
        if accepted.setting.secure_aggregation == "on":
            self._signing(offer)
        if self.check:
            self.fits = self._look(accepted, offer)
            raise ConsentRefused(
                "the run is within this client's consent; the client did not join, since it was started with --check"
            )
        if not pinned:
            self.ledger.require_unknown(accepted, offer.run)
            self.ledger.check(accepted, offer.run, offer.client)
            self._pin(offer)
        self.ledger.admit(accepted, offer.run, offer.client)  # after storing the offer, which fixes the configuration
        return accepted.statement.proven.epsilon

    def _answer_offer(self, offer: Offer) -> bytes:
        try:
            epsilon = self.consented(offer)
        except FedveilError as problem:
            why = printable(problem.__cause__ or problem)  # the cause stays on this machine
            if problem.__cause__ is not None and str(problem) != why:
                why = f"{why} ({printable(problem)})"
            if self._refused.get(offer.run) != why:  # it is offered repeatedly
                self.tell(f"run {offer.run}: {'' if self.check else 'refused: '}{why}")
            self._refused[offer.run], self.has_looked = why, self.check
            return refusal_bytes(offer, ONLY_LOOKS if self.check else str(problem))
        except Exception:  # its text may reveal data
            _log.exception("the offer of run %s", offer.run)
            return refusal_bytes(offer, "an error at the client, which its own log describes")
        self.tell(f"run {offer.run}: consented as client {offer.client}, epsilon = {at_most(epsilon)}")
        return consent_bytes(offer, epsilon)

    def _node(self, task: TaskMessage) -> ClientNode | MaskedNode:
        if task.run not in self._nodes:
            offer = self._pinned(task.run)
            if offer is None:
                raise WireError(f"a round of run {task.run}, to which this client has not consented")
            self._nodes[task.run] = self._made(offer)
        return self._nodes[task.run]

    def _made(self, offer: Offer) -> ClientNode | MaskedNode:
        folder, accepted = self._run_folder(offer.run), check_offer(self.consent, offer.parsed())
        experiment = accepted.experiment
        path = folder / "ledger.sqlite"
        if not was_begun(path):
            Ledger.create(path, offer.run, {"offer": offer.digest}).close()
        population = self.ledger.admit(accepted, offer.run, offer.client)
        try:
            data = self._own(offer, experiment)
            network = rehearsed(experiment, data, whole=False)  # the server has rehearsed a round
            job = federation(experiment, data, path, offer.run, network, population)
        except Exception as problem:  # whether the data can be read is private, and hidden by the noise
            _log.info("the data of run %s", offer.run, exc_info=True)
            why = printable(problem)
            self.tell(f"run {offer.run}: this client releases zero and noise: its data are not as the configuration says: {why}")
            data = empty_client_data(experiment)
            network = rehearsed(experiment, data, whole=False)
            job = federation(experiment, data, path, offer.run, network, population)
        states = ClientStates(folder / "states")

        def require(plan: Plan | Raw) -> None:
            require_noise(self.consent, accepted.setting, plan)
            require_price(accepted, plan)

        receipts = ClientReceipts(folder, offer.run, offer.receipt_key) if offer.receipt_key else None
        context = replace(job.context, longest=self.consent.limits.round_seconds)
        if accepted.setting.secure_aggregation == "on":

            def require_sum(plan: Plan, members: int) -> None:
                require(plan)
                require_share(accepted, plan, members)

            return MaskedNode.of(context, offer, self._signing(offer), folder, accepted.setting, require_sum, receipts)
        rule = participation_of(accepted.method, accepted.setting)
        return ClientNode(context, offer.run, offer.client, states, accepted.setting.rounds, require, rule, receipts)

    def _signing(self, offer: Offer) -> Ed25519PrivateKey:
        """Return the client's signing key; raise ConsentRefused if roster or key are others than those that the client knows."""
        roster = offer.signers
        if roster.digest.hex() != self.consent.roster:
            raise ConsentRefused(
                f"the run's roster has the digest {roster.digest.hex()}, and this client's consent pins {self.consent.roster}: "
                f"institutions compare what fedveil net roster prints, and pin it anew where it has changed"
            )
        if self.signing is None:
            raise ConsentRefused("this client has no signing key: fedveil net key NAME adds one, and its .pub is admitted again")
        if roster.keys.get(offer.client) != self.signing.public_key().public_bytes_raw():
            raise ConsentRefused(f"the roster lists another key for client {offer.client} than the key of this client")
        return self.signing

    def _own(self, offer: Offer, experiment: Experiment) -> Prepared:
        data = self.consent.data

        def tell(line: str) -> None:
            self.tell(f"run {offer.run}: {line}")

        return client_data(experiment, offer.client, data.file, tell, part=data.part is not None)

    def _look(self, accepted: AcceptedRun, offer: Offer) -> bool:
        """Report what consent would mean, and return whether the data fit; raise ConsentRefused if the lifetime is exceeded."""
        self.tell(to_markdown(accepted.statement))
        self.ledger.check(accepted, offer.run, offer.client)
        try:
            self._own(offer, accepted.experiment)
        except FedveilError as problem:
            self.tell(f"run {offer.run}: this client's data are not as the configuration says: {printable(problem)}")
            return False
        return True

    def _pin(self, offer: Offer) -> None:
        """Store the offer, and sync it to disk."""
        folder, fields = self._run_folder(offer.run), vars(offer)  # its version for the record: an upgrade changes no offer
        replace_whole(folder / "offer.json", json.dumps(fields).encode(), private=True)
        for listed in (folder, folder.parent, self.folder):
            sync_path(listed)

    def _run_folder(self, run: str) -> Path:
        return owner_only_folder(owner_only_folder(self.folder / "runs") / run)

    def _pinned(self, run: str) -> Offer | None:
        path = self.folder / "runs" / run / "offer.json"
        if not path.exists():
            return None
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Offer(**fields)


_POLL = 0.2
_RETRY = 10.0
_FAREWELL = 5.0
"""Seconds for an answer to be sent before the client ends."""


@dataclass(frozen=True)
class Joining:
    """Connection of a client to its server.

    Args:
        server: host:port. authority: the certificate `ca.pem` from the server's operator. key: the client's private key.
        folder: its own, for ledgers and states. check: show offers, and take no part.
        tell: called with a line for each event. until: called between messages; returns whether to end.
        changed: called between messages; returns another consent, why it cannot be read, or None if it is as before.
        note: called with what changes in the state of the client (`Status.update`).
    """

    server: str
    authority: Path
    key: Path
    folder: Path
    check: bool = False
    tell: Callable[[str], None] = lambda line: None
    until: Callable[[], bool] = lambda: False
    changed: Callable[[], Consent | ConfigError | None] = lambda: None
    note: Callable[..., None] = lambda **values: None


def join(consent: Consent, joining: Joining) -> bool:
    """Answer offers and rounds until told to end.

    Returns:
        With `check`, whether this client would take part in what was offered, with all of its data.

    Raises:
        ConfigError: certificate or key are missing or invalid; or another process has joined this server with this folder.
            FedveilError: Flower is not installed.
    """
    for what, path in (("--ca", joining.authority), ("--key", joining.key)):
        if not path.is_file():
            raise ConfigError(f"{what} {path}: there is no such file")
    host, _, port_of_server = joining.server.rpartition(":")
    if not (host and port_of_server.isdecimal() and 0 < int(port_of_server) < 65536):
        raise ConfigError(f"the server is named as host:port, such as 192.0.2.7:9700, got {joining.server!r}")
    require_fleet_routes()
    check_readable(joining.authority, joining.key)
    if soon := expiry(joining.authority, "ask the server's operator for the ca.pem that follows it"):
        joining.tell(soon)
    import torch

    limit_memory(consent.limits.memory_bytes)
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    signing, port = signing_key(joining.key), free_port()
    client = JoinedClient(joining.folder, consent, joining.tell, check=joining.check, signing=signing)
    expected = hashlib.sha256(bundle()).hexdigest()

    def tell(line: str) -> None:
        clocks = clocks_that_differ(host, int(port_of_server))
        joining.tell(line + (f" ({clocks})" if clocks else advice(line, joining)))

    with ExitStack() as stack:
        secret = stack.enter_context(_alone(joining))
        endpoint = Endpoint(f"127.0.0.1:{port}", None, secret.read_bytes())
        stack.enter_context(ended_by_signal())
        supernode = stack.enter_context(running(_supernode(joining, port, secret, consent.limits.memory), tell, _RETRY))
        queue = TaskQueue(endpoint, "flwr-clientapp")
        asked: Queue[tuple[list[bytes], Future[bytes]]] = Queue()

        refused = ""

        def refuse(reason: str) -> None:  # the server repeats its offers
            nonlocal refused
            if reason != refused:
                joining.tell(f"a message was refused: {printable(reason)}")
            refused = reason

        joining.note(state="waiting for an offer")
        notify("READY=1")
        joining.tell(f"waiting for what {joining.server} offers, once it runs and this key is admitted")
        try:
            end = math.inf
            while not joining.until() and time.monotonic() < end:
                token = queue.take()
                if token is not None:
                    carried = (endpoint, token, expected, asked, supernode.process, refuse)
                    threading.Thread(target=_carry, args=carried, daemon=True).start()
                if (consent_now := joining.changed()) is not None:
                    client.change_consent(consent_now)
                with suppress(Empty):
                    _answer(client, *asked.get(timeout=_POLL))
                    joining.note(**client.last)
                if client.has_looked:
                    end = min(end, time.monotonic() + _FAREWELL)
        finally:
            queue.close()
    return client.fits


@contextmanager
def _alone(joining: Joining) -> Iterator[Path]:
    """Yield a file with the secret of this process, for which it holds an exclusive lock per server and folder.

    The kernel releases the lock when the process ends, however it ends.

    Raises:
        ConfigError: another process holds the lock.
    """
    where = re.sub(r"[^A-Za-z0-9.]+", "-", joining.server)
    owner = joining.folder / f"joined-{where}"
    descriptor = os.open(owner, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"--dir {joining.folder}: another process (its number: {holder}) has joined {joining.server} with it, and "
                f"goes on: end it first; another client needs a --dir and a --key of its own"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        secret = joining.folder / f"secret-{where}"
        replace_whole(secret, secrets.token_bytes(32), private=True)
        yield secret
    finally:
        os.close(descriptor)


def advice(line: str, joining: Joining) -> str:
    """Return advice for errors of Flower that name no cause, or an empty string."""
    unknown = (
        f"this key is not admitted: send {joining.key}.pub to the server's operator, who runs `fedveil net admit` and starts the "
        f"server again; this client tries again every {_RETRY:g} seconds"
    )
    causes = {
        "must be registered": unknown,
        "404 Not Found": unknown,
        "activate SuperNode": f"this key is not admitted, or was online a moment ago. Not admitted: send {joining.key}.pub to "
        f"the server's operator, who runs `fedveil net admit` and starts the server again. Admitted: the server counts an "
        f"earlier connection for up to a minute, and one of another process with this key for ever. This client tries again "
        f"every {_RETRY:g} seconds",
        "certificate has expired": f"the certificate of {joining.server} has ended, or this machine's clock is wrong: ask the "
        f"server's operator for fedveil net renew; this client tries again every {_RETRY:g} seconds",
        "CERTIFICATE_VERIFY_FAILED": f"the certificate at {joining.server} is not of the authority in {joining.authority}: ask "
        f"the server's operator for its ca.pem, and for the name that it was made for (fedveil net init --host)",
    }
    return next((f" ({text})" for words, text in causes.items() if words in line), "")


def _carry(
    endpoint: Endpoint,
    token: str,
    expected: str,
    asked: Queue[tuple[list[bytes], Future[bytes]]],
    supernode: Popen[bytes] | None,
    refuse: Callable[[str], None],
) -> None:
    """Deliver one message and send its answer; runs in a thread, so that a message that never arrives blocks no other."""
    try:
        if reason := answer_message(endpoint, token, expected, partial(_through, asked)):
            refuse(reason)
    except Exception as problem:  # a connection error: the message is lost, the client stays
        _log.warning("a message was lost: %s", problem)
        if supernode is not None:  # it would wait for this answer forever; after a restart it is asked again
            supernode.terminate()


def _through(asked: Queue[tuple[list[bytes], Future[bytes]]], parts: list[bytes]) -> bytes:
    """Return the answer, made by the thread that has the ledgers."""
    answer: Future[bytes] = Future()
    asked.put((parts, answer))
    return answer.result()


def _answer(client: JoinedClient, parts: list[bytes], answer: Future[bytes]) -> None:
    try:
        answer.set_result(client.answer(parts))
    except WireError as problem:
        answer.set_exception(problem)
    except Exception:  # its text may reveal data
        _log.exception("a message was not answered")
        answer.set_exception(WireError("an error at the client, which its own log describes"))


def _supernode(joining: Joining, port: int, secret: Path, memory: int) -> Program:
    command = ["flower-supernode", "--superlink", joining.server, "--root-certificates", str(joining.authority)]
    command += ["--auth-supernode-private-key", str(joining.key), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    return Program(command, joining.folder / "flower", joining.folder / "supernode.log", memory=memory)
