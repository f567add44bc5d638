"""A client's side of a round: its state on its own disk, training, and release through its own door.

    ROUND.safetensors   after the client's answer to that round: its private state, its policy state, the request, the answer

A server that lost a round asks for it again. The same request gets the same answer, to the bit, so nothing new leaves; another
request of the same round starts from the generation before. A server that lost more than that is refused, for the client would
have to begin anew without anybody noticing.

The client makes its plan itself, from its own method and its own policy state. In the server view the release is charged to the
client's own ledger before it is written to its disk, and is on its disk before it is answered; so whatever is lost on the way, no
release is missing in that ledger, and no second one is made in its place. In the other views the planned rounds were charged in
advance, each at its own price, so each is answered once: asked in another way it is refused.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    from fedveil.mechanism.mechanisms import Participation


_DAMAGE = (OSError, KeyError, ValueError, TypeError, SafetensorError)


_CHARGE = 2**18
"""Bytes that the ledgers of run and lifetime take at most for one release."""


class NoRoom(FedveilError):
    """A disk that is full; its words name no file."""


class DamagedState(FedveilError):
    """A file of states that cannot be read; its words name the file."""


@dataclass(frozen=True)
class Generation:
    """A client's states after a round.

    Args:
        request, answer: of that round. rounds: how many rounds led to these states. answers: how many answers the client gave so
            far, those included that led to states which were dropped.
    """

    private: State = field(default_factory=dict)
    policy: State = field(default_factory=dict)
    request: str = ""
    answer: bytes = b""
    rounds: int = 0
    answers: int = 0


class ClientStates:
    """The states of one client in one run.

    Args:
        folder: of its own, made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answered(self, round: int, request: str) -> bytes | None:
        """The answer that this very request got before."""
        if round not in self._rounds():
            return None
        kept = self._read(round)
        return kept.answer if kept.request == request else None

    @property
    def newest(self) -> int:
        """The last round that was answered; -1 before the first."""
        return max(self._rounds(), default=-1)

    def before(self, round: int) -> Generation:
        """The states with which the client enters that round.

        Raises:
            FedveilError: the server has gone back further than this client can. DamagedState: a file is damaged.
        """
        rounds = self._rounds()
        earlier = [r for r in rounds if r < round]
        kept = {r: self._read(r) for r in rounds}
        answers = max((generation.answers for generation in kept.values()), default=0)
        if earlier:
            return replace(kept[earlier[-1]], answers=answers)
        if rounds and kept[rounds[0]].rounds > 1:
            raise FedveilError(
                f"the server asks for round {round} again, and this client, which keeps two rounds, has gone on to round "
                f"{rounds[-1]}: go on with a newer checkpoint of the server, or begin a new run"
            )
        return Generation(answers=answers)

    @contextmanager
    def room_for(self, round: int, generation: Generation) -> Iterator[None]:
        """Take the room on the disk that `keep` needs for such states, and that a charge needs, before anything is charged.

        Raises:
            FedveilError: there is none.
        """
        self._made()
        path, of_the_charge = self._path(round), self.folder / "charge"
        try:
            reserve(path, sum(memoryview(part).nbytes for part in tree_parts(_tree(generation))))
            reserve(of_the_charge, _CHARGE)
        except OSError as problem:
            _draft(path).unlink(missing_ok=True)
            raise NoRoom(
                "this client's disk has no room for what it keeps of a round: nothing was charged, and nothing leaves"
            ) from problem
        _draft(of_the_charge).unlink()
        try:
            yield
        finally:
            _draft(path).unlink(missing_ok=True)

    def keep(self, round: int, generation: Generation) -> None:
        """Write the states after that round, in the room that was taken; when this returns, they are on the disk. Two stay."""
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
    return {**vars(generation), "answer": torch.frombuffer(bytearray(generation.answer), dtype=torch.uint8)}


def _draft(path: Path) -> Path:
    return path.with_name(path.name + DRAFT)


def request_name(*messages: bytes) -> str:
    """A digest of what a client was asked."""
    found = hashlib.sha256()
    for message in messages:
        found.update(hashlib.sha256(message).digest())
    return found.hexdigest()


_log = logging.getLogger(__name__)
_SPENT = "its release costs more than is left of this client's budget; its own log tells how much"
_RECORD = "this client's own record of the run does not allow it; its own log tells why"


@dataclass(frozen=True)
class ClientNode:
    """One client in one run.

    Args:
        context: with its own examples and a door that charges its own ledger. run: as the server names it.
        client: its number. states: on its own disk. rounds: how many it answers at most, and all before that number.
        require: refuses a plan that the client did not agree to, by raising a FedveilError. participation: how often it may be
            asked, where the price of its rounds assumes that.
    """

    context: Context
    run: str
    client: int
    states: ClientStates
    rounds: int
    require: Callable[[Plan | Raw], None] = lambda plan: None
    participation: Participation | None = None

    def answer(self, round: bytes, task: bytes) -> bytes:
        """The reply to the messages of a round, or a refusal with its reason.

        Raises:
            WireError: they are no messages to this client in this run.
        """
        told, own = read_round(round, self.context.door.layout.dimension), read_task(task)
        if (told.run, told.released.round) != (own.run, own.round):
            raise WireError(
                f"a task for round {own.round} of run {own.run}, with the model of round {told.released.round} of run {told.run}"
            )
        if (own.run, own.client) != (self.run, self.client):
            raise WireError(
                f"a task for client {own.client} in run {own.run}, and this is client {self.client} in run {self.run}"
            )
        request = request_name(round, task)
        try:
            return self.states.answered(own.round, request) or self._answered(told, own, request)
        except FedveilError as problem:
            _log.warning("round %d refused: %s", own.round, problem)
            return reply_bytes(RefusalMessage(own, _told_to_server(problem)))
        except Exception:  # whose words may tell of the data
            _log.exception("round %d failed", own.round)
            return reply_bytes(RefusalMessage(own, "an error at the client, which its own log describes"))

    def _answered(self, told: RoundMessage, own: TaskMessage, request: str) -> bytes:
        context, before = self.context, self.states.before(own.round)
        if max(own.round, before.answers) >= self.rounds:
            raise ConfigError(f"the run has {self.rounds} rounds, and this client gave {before.answers} answers")
        if context.summed and own.round <= self.states.newest:
            raise ConfigError(
                f"this client has answered round {self.states.newest}: where planned rounds are charged in advance, it answers "
                f"each of them once, in their order"
            )
        self._require_participation(own.round, before.answers)
        state = told.plan_state if context.summed else before.policy or context.policy.start()
        plan = self._plan(told, state)
        self.require(plan)
        name = plan_name(plan, context.door.layout)
        outcome = client_round(
            context,
            ClientTask(
                own.client, told.released, own.weight, plan if context.summed else None, state, before.private, told.buffers
            ),
        )
        salt = context.randomness.key("salt", own.round, self.client).hex()
        kept = replace(before, request=request, rounds=before.rounds + 1, answers=before.answers + 1)
        if outcome.release is not None:
            private = before.private if outcome.error else outcome.private or before.private
            kept = replace(kept, private=private, policy={} if context.summed else outcome.policy_state or before.policy)
        longest = 8 * (context.door.parts.dimension + (0 if told.buffers is None else told.buffers.numel())) + 2**16
        with self.states.room_for(own.round, replace(kept, answer=bytes(longest))):
            released, buffers = self._let_out(outcome.release, salt)
            answer = reply_bytes(ReleaseMessage(own, name, salt, released, buffers), release_bounds(context.door, plan))
            self.states.keep(own.round, replace(kept, answer=answer))
        return answer

    def _require_participation(self, round: int, answers: int) -> None:
        rule, newest = self.participation, self.states.newest
        if rule is not None and (answers >= rule.times or (newest >= 0 and round - newest < rule.separation)):
            raise ConfigError(
                f"the price of this run assumes that a client takes part in at most {rule.times} rounds, at least "
                f"{rule.separation} apart, and this client has answered {answers}, the last of them round {newest}"
            )

    def _plan(self, told: RoundMessage, state: State) -> Plan | Raw:
        client = told.released.client if self.context.summed else self.client
        return self.context.plan(replace(told.released, client=client), state)

    def _let_out(self, release: SealedUpload | Contribution | None, salt: str) -> tuple[Tensor | None, Tensor | None]:
        """What leaves, and the batch statistics with it; charged first where it leaves on its own."""
        if isinstance(release, SealedUpload):
            (upload,) = self.context.door.release_uploads([naming_its_bits(self.context.door, release, salt)])
            return self.context.door.leaving(upload), upload.buffers
        return (None, None) if release is None else (release.sealed, release.buffers)


def _told_to_server(problem: FedveilError) -> str:
    """Why a round is refused, without the words that tell of the client's lifetime or of its disk."""
    if isinstance(problem, BudgetExhausted):
        return _SPENT
    return _RECORD if isinstance(problem, LedgerError | DamagedState) else str(problem)
