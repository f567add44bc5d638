"""A client's side of a round: read what the server says, train, let the release through the client's own door, answer.

The client makes its plan itself, from its own method and its own policy state. In the server view the release is charged to the
client's own ledger before it is written to its disk, and is on its disk before it is answered; so whatever is lost on the way, no
release is missing in that ledger, and no second one is made in its place. In the other views the planned rounds were charged in
advance, each at its own price, so each is answered once: asked in another way it is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedveil.errors import BudgetExhausted, ConfigError, FedveilError, LedgerError
from fedveil.federation.round import ClientTask, Context, client_round
from fedveil.flower.client_states import ClientStates, DamagedState, request_name
from fedveil.flower.received_release import naming_its_bits, release_bounds
from fedveil.flower.round_messages import (
    RefusalMessage,
    ReleaseMessage,
    RoundMessage,
    TaskMessage,
    plan_name,
    read_round,
    read_task,
    reply_bytes,
)
from fedveil.flower.wire_format import WireError
from fedveil.mechanism.plan import Plan, Raw
from fedveil.release.sealed import Contribution, SealedUpload

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.mechanism.noise_mechanism import Participation
    from fedveil.training.local import State

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
