"""A client's side of a round: its state on its own disk, training, and release through its own door.

    ROUND.safetensors   after the client's answer to that round: private state, policy state, request, answer

A server that lost a round asks for it again. The same request gets the same answer, bit for bit, so nothing new is released.
Another request for the same round starts from the generation before. A server that lost more than that is refused, since the
client would have to start over unnoticed.

The client makes its own plan, from its method and its policy state. In the server view the release is charged to the client's
ledger before it is written to disk, and is on disk before it is sent. So even if messages are lost, no release is missing in that
ledger, and no second one replaces it. In the other views the planned rounds were charged in advance, each at its own price, so
each is answered once; a different request is refused.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError

from fedveil.deploy.round_messages import (
    RefusalMessage,
    ReleaseMessage,
    RoundMessage,
    TaskMessage,
    naming_its_bits,
    plan_name,
    read_round,
    read_task,
    release_bounds,
    reply_bytes,
)
from fedveil.deploy.wire_format import WireError
from fedveil.errors import BudgetExhausted, ConfigError, FedveilError, LedgerError
from fedveil.federation.plain_state import read_tree, tree_parts
from fedveil.federation.round import ClientTask, Context, client_round
from fedveil.ledger.files import DRAFT, owner_only_folder, replace_whole, reserve, sync_path
from fedveil.mechanism.plan import Plan, Raw
from fedveil.release.sealed import Contribution, SealedUpload
from fedveil.training.local import State

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.experiment.receipts import ClientReceipts
    from fedveil.mechanism.mechanisms import Participation


_DAMAGE = (OSError, KeyError, ValueError, TypeError, SafetensorError)


_CHARGE = 2**18
"""Upper bound on the bytes that one release takes in the ledgers of run and lifetime."""


class NoRoom(FedveilError):
    """Raised if the disk is full; its message names no file."""


class DamagedState(FedveilError):
    """Raised if a state file cannot be read; its message names the file."""


@dataclass(frozen=True)
class Generation:
    """A client's states after a round.

    Args:
        request, answer: of that round. rounds: number of rounds that led to these states. answers: number of answers so far,
            including those that led to dropped states.
    """

    private: State = field(default_factory=dict)
    policy: State = field(default_factory=dict)
    request: str = ""
    answer: bytes = b""
    rounds: int = 0
    answers: int = 0


class ClientStates:
    """States of one client in one run.

    Args:
        folder: of this client only, created when something is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answered(self, round: int, request: str) -> bytes | None:
        """Return the stored answer to exactly this request, or None."""
        if round not in self._rounds():
            return None
        stored = self._read(round)
        return stored.answer if stored.request == request else None

    @property
    def newest(self) -> int:
        """Return the last answered round, or -1."""
        return max(self._rounds(), default=-1)

    def before(self, round: int) -> Generation:
        """Return the states with which the client enters that round.

        Raises:
            FedveilError: the server has gone back further than this client can. DamagedState: a file is damaged.
        """
        rounds = self._rounds()
        earlier = [r for r in rounds if r < round]
        stored = {r: self._read(r) for r in rounds}
        answers = max((generation.answers for generation in stored.values()), default=0)
        if earlier:
            return replace(stored[earlier[-1]], answers=answers)
        if rounds and stored[rounds[0]].rounds > 1:
            raise FedveilError(
                f"the server asks for round {round} again, and this client, which keeps two rounds, has gone on to round "
                f"{rounds[-1]}: go on with a newer checkpoint of the server, or begin a new run"
            )
        return Generation(answers=answers)

    @contextmanager
    def room_for(self, round: int, generation: Generation) -> Iterator[None]:
        """Reserve the disk space for `keep` and for a charge, before anything is charged.

        Raises:
            FedveilError: the disk is full.
        """
        self._made()
        path, of_the_charge = self._path(round), self.folder / "charge"
        try:
            reserve(path, sum(memoryview(part).nbytes for part in tree_parts(_tree(generation))))
            reserve(of_the_charge, _CHARGE)
        except OSError as problem:
            _draft(path).unlink(missing_ok=True)
            raise NoRoom(
                "this client's disk has no room for what it keeps of a round: nothing was charged, and nothing is sent"
            ) from problem
        _draft(of_the_charge).unlink()
        try:
            yield
        finally:
            _draft(path).unlink(missing_ok=True)

    def keep(self, round: int, generation: Generation) -> None:
        """Write the states after that round into the reserved space and sync them; the last two rounds are retained."""
        self._made()
        replace_whole(self._path(round), tree_parts(_tree(generation)), private=True)
        sync_path(self.folder)
        stay = [r for r in self._rounds() if r <= round][-2:]
        for other in set(self._rounds()) - set(stay):
            self._path(other).unlink(missing_ok=True)

    def _made(self) -> None:
        for folder in (self.folder.parent, self.folder):
            owner_only_folder(folder)

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.safetensors"))

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}.safetensors"

    def _read(self, round: int) -> Generation:
        try:
            tree = read_tree(self._path(round))
            return Generation(**{**tree, "answer": tree["answer"].numpy().tobytes()})
        except _DAMAGE as problem:
            raise DamagedState(
                f"the client's state in {self._path(round)} is damaged ({type(problem).__name__}): put a copy of it back, or "
                f"take no further part in this run"
            ) from problem


def _tree(generation: Generation) -> dict[str, Any]:
    return {**vars(generation), "answer": torch.from_numpy(np.frombuffer(bytearray(generation.answer), np.uint8))}


def _draft(path: Path) -> Path:
    return path.with_name(path.name + DRAFT)


def request_name(*messages: bytes) -> str:
    """Return a digest of a client's request."""
    digest = hashlib.sha256()
    for message in messages:
        digest.update(hashlib.sha256(message).digest())
    return digest.hexdigest()


_log = logging.getLogger(__name__)
_SPENT = "the release costs more privacy than this client's budget still allows; its log says how much"
_RECORD = "this client's own record of the run does not allow it; its own log tells why"


@dataclass(frozen=True)
class ClientNode:
    """One client in one run.

    Args:
        context: with the client's own examples and a door that charges its own ledger. run: as the server names it.
        client: its number. states: on its own disk. rounds: number of answers at most, and upper bound of round numbers.
        require: raises a FedveilError for a plan that the client did not agree to. participation: the rule that the rounds'
            price assumes, or None. receipts: of this run, if the server gives some.
    """

    context: Context
    run: str
    client: int
    states: ClientStates
    rounds: int
    require: Callable[[Plan | Raw], None] = lambda plan: None
    participation: Participation | None = None
    receipts: ClientReceipts | None = None

    def answer(self, round: bytes, task: bytes) -> bytes:
        """Return the reply to the messages of a round, or a refusal with its reason.

        Raises:
            WireError: they are not messages to this client in this run.
        """
        sent, asked = read_round(round, self.context.door.layout.dimension), read_task(task)
        if (sent.run, sent.released.round) != (asked.run, asked.round):
            raise WireError(
                f"a task for round {asked.round} of run {asked.run}, with the model of round {sent.released.round} of run "
                f"{sent.run}"
            )
        require_addressed(asked, self.run, self.client)
        request = request_name(round, task)

        def answered() -> bytes:
            answer = self.states.answered(asked.round, request) or self._answered(sent, asked, request)
            if self.receipts is not None:
                self.receipts.answer(asked.round, hashlib.sha256(answer).hexdigest())
            return answer

        return answered_or_refused(asked, answered)

    def _answered(self, sent: RoundMessage, asked: TaskMessage, request: str) -> bytes:
        context, before = self.context, self.states.before(asked.round)
        if max(asked.round, before.answers) >= self.rounds:
            raise ConfigError(f"the run has {self.rounds} rounds, and this client gave {before.answers} answers")
        if context.summed and asked.round <= self.states.newest:
            raise ConfigError(
                f"this client has answered round {self.states.newest}: where planned rounds are charged in advance, it answers "
                f"each of them once, in their order"
            )
        self._require_participation(asked.round, before.answers)
        if self.receipts is not None:
            self.receipts.keep(sent.receipt, asked.round, sent.released.model.numpy().tobytes())
        state = sent.plan_state if context.summed else before.policy or context.policy.start()
        plan = self._plan(sent, state)
        self.require(plan)
        name = plan_name(plan, context.door.layout)
        outcome = client_round(
            context,
            ClientTask(
                asked.client, sent.released, asked.weight, plan if context.summed else None, state, before.private, sent.buffers
            ),
        )
        if outcome.error:  # which the server does not learn
            _log.warning("round %d: this client releases zero and noise: %s", asked.round, outcome.error)
        salt = context.randomness.key("salt", asked.round, self.client).hex()
        after = replace(before, request=request, rounds=before.rounds + 1, answers=before.answers + 1)
        if outcome.release is not None:
            private = before.private if outcome.error else outcome.private or before.private
            after = replace(after, private=private, policy={} if context.summed else outcome.policy_state or before.policy)
        longest = 8 * (context.door.parts.dimension + (0 if sent.buffers is None else sent.buffers.numel())) + 2**16
        with self.states.room_for(asked.round, replace(after, answer=bytes(longest))):
            released, buffers = self._let_out(outcome.release, salt)
            answer = reply_bytes(ReleaseMessage(asked, name, salt, released, buffers), release_bounds(context.door, plan))
            self.states.keep(asked.round, replace(after, answer=answer))
        return answer

    def _require_participation(self, round: int, answers: int) -> None:
        rule, newest = self.participation, self.states.newest
        if rule is not None and (answers >= rule.times or (newest >= 0 and round - newest < rule.separation)):
            raise ConfigError(
                f"the price of this run assumes that a client takes part in at most {rule.times} rounds, at least "
                f"{rule.separation} apart, and this client has answered {answers}, the last of them round {newest}"
            )

    def _plan(self, sent: RoundMessage, state: State) -> Plan | Raw:
        client = sent.released.client if self.context.summed else self.client
        return self.context.plan(replace(sent.released, client=client), state)

    def _let_out(self, release: SealedUpload | Contribution | None, salt: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the release and its batch statistics; an upload is charged first."""
        if isinstance(release, SealedUpload):
            (upload,) = self.context.door.release_uploads([naming_its_bits(self.context.door, release, salt)])
            return self.context.door.released_bits(upload), upload.buffers
        return (None, None) if release is None else (release.sealed, release.buffers)


def require_addressed(asked: TaskMessage, run: str, client: int) -> None:
    """Refuse a task of another run or for another client; raise WireError."""
    if (asked.run, asked.client) != (run, client):
        raise WireError(f"a task for client {asked.client} in run {asked.run}, and this is client {client} in run {run}")


def answered_or_refused(asked: TaskMessage, answered: Callable[[], bytes]) -> bytes:
    """Return an answer, or a refusal with its reason."""
    try:
        return answered()
    except FedveilError as problem:
        _log.warning("round %d refused: %s", asked.round, problem)
        return reply_bytes(RefusalMessage(asked, _told_to_server(problem)))
    except Exception:  # its text may reveal data
        _log.exception("round %d failed", asked.round)
        return reply_bytes(RefusalMessage(asked, "an error at the client, which its own log describes"))


def _told_to_server(problem: FedveilError) -> str:
    """Return why a round is refused, without details of the client's lifetime or disk."""
    if isinstance(problem, BudgetExhausted):
        return _SPENT
    return _RECORD if isinstance(problem, LedgerError | DamagedState) else str(problem)
