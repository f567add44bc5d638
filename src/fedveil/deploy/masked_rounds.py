"""Rounds with secure aggregation over the wire, each in two exchanges; `fedveil.secure_aggregation` has the protocol.

    1  the server sends the round, as always; a client trains, and answers with a fresh key (READY)
    2  the server names an attempt and its set (SET); a client answers with its masked vector (MASKED)

Exchange 2 is repeated with a smaller set as long as one of the set fails, clients are left and attempts are left.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedveil.deploy.client_node import ClientStates, Generation, answered_or_refused, require_addressed
from fedveil.deploy.grid_engine import GridEngine
from fedveil.deploy.round_messages import (
    TaskMessage,
    kind_of,
    masks_bytes,
    read_masks,
    read_round,
    read_set,
    read_task,
    set_bytes,
    task_bytes,
)
from fedveil.deploy.wire_format import Kind, WireError
from fedveil.errors import BudgetExhausted, ConfigError, LedgerError
from fedveil.experiment.receipts import ATTEMPTS, Answer, Answers
from fedveil.federation.round import ClientTask, Context, Failure, Outcome, Work, attempted, sealed_outcome
from fedveil.federation.shared_sums import SetPlans, terms_of
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.mechanism.plan import Plan
from fedveil.release.noise import Randomness
from fedveil.release.sealed import ELSEWHERE, Contribution
from fedveil.secure_aggregation.attempt_file import AttemptFile
from fedveil.secure_aggregation.coordinator import Coordinator
from fedveil.secure_aggregation.member import Member

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedveil.deploy.offers import ConsentingClients, Offer
    from fedveil.deploy.round_messages import RoundMessage
    from fedveil.experiment.receipts import ClientReceipts, ServerReceipts
    from fedveil.federation.progress import Federation
    from fedveil.methods.setting import Setting
    from fedveil.secure_aggregation.encoding import Terms
    from fedveil.secure_aggregation.masks import Integers


def agreed_terms(context: Context, setting: Setting, offer: Offer) -> Terms:
    """Return the terms of an offered run, the same at the server and at each client."""
    return terms_of(context, setting, offer.run, offer.common_digest, offer.signers)


@dataclass
class MaskedNode:
    """One client in one run with secure aggregation.

    Args:
        context: with the client's own examples. member: its side of the protocol. states: on its own disk.
        setting: of the run. require: raises a FedveilError for a plan, as a set of so many clients would execute it, that the
            client did not agree to. receipts: of this run.
    """

    context: Context
    member: Member
    states: ClientStates
    setting: Setting
    require: Callable[[Plan, int], None]
    receipts: ClientReceipts | None = None
    _after: Generation = field(default_factory=Generation)

    @classmethod
    def of(
        cls, context: Context, offer: Offer, signing: Ed25519PrivateKey, folder: Path, setting: Setting, *more: Any
    ) -> MaskedNode:
        """Return the client of an offered run; `folder` is its own in that run."""
        attempts = AttemptFile(folder / ATTEMPTS)
        member = Member(offer.client, signing, agreed_terms(context, setting, offer), attempts)
        return cls(context, member, ClientStates(folder / "states"), setting, *more)

    def answer(self, content: bytes, task: bytes) -> bytes:
        """Return the reply to a round or to the request of an attempt, or a refusal with its reason.

        Raises:
            WireError: they are not messages to this client in this run.
        """
        asked = read_task(task)
        require_addressed(asked, self.member.terms.run, self.member.client)
        if kind_of(content) is Kind.SET:
            return answered_or_refused(asked, partial(self._masked, read_set(content, asked), asked))
        sent = read_round(content, self.context.door.layout.dimension)
        if (sent.run, sent.released.round) != (asked.run, asked.round):
            raise WireError(f"a task for round {asked.round}, with the model of round {sent.released.round} of run {sent.run}")
        return answered_or_refused(asked, partial(self._ready, content, sent, asked))

    def _ready(self, told: bytes, sent: RoundMessage, asked: TaskMessage) -> bytes:
        self._require_all_attempts()
        if asked.round >= self.setting.rounds:
            raise ConfigError(f"the run has {self.setting.rounds} rounds, and this would be round {asked.round}")
        whole = self.context.plan(sent.released, sent.plan_state)
        if not isinstance(whole, Plan):
            raise ConfigError("a plan that reads private data cannot be divided into shares of noise")
        if self.receipts is not None:
            self.receipts.keep(sent.receipt, asked.round, sent.released.model.numpy().tobytes())
        before = self.states.before(asked.round)
        task = ClientTask(asked.client, sent.released, asked.weight, whole, sent.plan_state, before.private, sent.buffers)
        plans = SetPlans(whole, self.context.door.parts, self.member.terms)
        release = _Release(self, plans, replace(task, common=plans.of(self.setting.cohort)), before)
        return masks_bytes(Kind.READY, asked, self.member.ready(asked.round, told, release))

    def _masked(self, request: bytes, asked: TaskMessage) -> bytes:
        answer, row = self.member.masked(request), self.member.attempts.rows[-1]
        self.states.keep(row["round"], self._after)
        if self.receipts is not None:
            self.receipts.answer(row["round"], row["vector"])
        return masks_bytes(Kind.MASKED, asked, answer)

    def _require_all_attempts(self) -> None:
        """Refuse to go on without the attempts of what this client has answered, by its states and its answers.

        Raises:
            LedgerError: the file of attempts lacks some.
        """
        rows = self.member.attempts.rows
        sent = frozenset[str]() if self.receipts is None else self.receipts.answered
        if self.states.newest not in {-1, *(row["round"] for row in rows)} or not sent <= {row["vector"] for row in rows}:
            raise LedgerError(
                f"{self.member.attempts.path} lacks attempts that this client has answered, and could answer them twice: restore "
                f"its newest copy, or take no further part in this run"
            )

    def trained(self, after: Generation) -> None:
        """Remember the states after the round, which are stored when its first masked vector leaves."""
        self._after = after


@dataclass
class _Release:
    """One client's release of a round (see `secure_aggregation.member.SharedRelease`)."""

    node: MaskedNode
    plans: SetPlans
    task: ClientTask
    before: Generation
    _work: Work | Failure | None = None

    def plan(self, members: int) -> bytes:
        self.node.require(self.plans.whole, members)
        return self.plans.plan(members)

    def train(self) -> None:
        plan = self.task.common
        assert plan is not None
        self._work = attempted(self.node.context, self.task, plan)

    def noisy(self, members: int) -> Integers:
        assert self._work is not None, "trained first"
        context, door = self._context(), self.node.context.door
        outcome = sealed_outcome(context, self.task, self._work, time.perf_counter(), door.compile(self.plans.of(members)))
        private = self.before.private if outcome.error else outcome.private or self.before.private
        self.node.trained(replace(self.before, private=private, rounds=self.before.rounds + 1, answers=self.before.answers + 1))
        assert isinstance(outcome.release, Contribution)
        return outcome.release.sealed.numpy()

    def _context(self) -> Context:
        """Return the context whose door draws other noise than in all earlier attempts, also where noise comes from the seed."""
        context, attempts = self.node.context, self.node.member.attempts
        if all(row["round"] != self.task.released.round for row in attempts.rows):
            return context
        seed = context.randomness.derive("attempt", attempts.newest)
        return replace(context, door=replace(context.door, randomness=Randomness(seed, context.randomness.seeded_noise)))


def engine_for(
    job: Federation,
    exchange: ConsentingClients,
    run: str,
    folder: Path,
    receipts: ServerReceipts | None,
    tell: Callable[[str], None],
) -> GridEngine:
    """Return the engine that reaches the clients of a run over the wire, with secure aggregation if the run has it.

    Args:
        folder: the run directory.
    """
    more = job.context, run, exchange, tell
    if job.setting.secure_aggregation != "on":
        return GridEngine(*more, again=exchange.again, receipts=receipts)
    terms = agreed_terms(job.context, job.setting, exchange.offered(0))
    coordinator = Coordinator(terms, AttemptFile(folder / "private" / ATTEMPTS))
    return MaskedEngine(coordinator, *more, again=exchange.again, receipts=receipts)


class MaskedEngine(GridEngine):
    """Engine over an `Exchange` for rounds with secure aggregation: of each round it receives the sum of a set, or nothing.

    Args:
        coordinator: the server's side of the protocol. more: as in `GridEngine`.
    """

    def __init__(self, coordinator: Coordinator, *more: Any, **options: Any) -> None:
        super().__init__(*more, **options)
        self.coordinator = coordinator

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """Ask all clients whether they are ready, then sets for their sum; yield the sum with the first client of the set.

        Raises:
            BudgetExhausted: all attempts of the run are used up.
        """
        todo = {task.client: task for task in tasks}
        if not todo:
            return
        first, coordinator = next(iter(todo.values())), self.coordinator
        whole = self.context.plan(first.released, first.policy_state)
        assert isinstance(whole, Plan)
        told = self.round_bytes(first)
        asked = {c: TaskMessage(self.run, first.released.round, c, task.weight) for c, task in todo.items()}
        plans = SetPlans(whole, self.context.door.parts, coordinator.terms)
        coordinator.begin(first.released.round, told, plans)
        reasons, tries = self._ready(told, asked), 0
        while len(reasons) == len(todo) and self.again is not None and self.again(asked.keys(), tries):
            reasons, tries = self._ready(told, asked), tries + 1
        total: Integers | None = None
        while total is None and (request := coordinator.name_set()) is not None:
            reasons |= self._masked(request, {client: asked[client] for client in coordinator.members})
            total = coordinator.total()
        members = () if total is None else coordinator.members
        self._charge_unused(plans, opened=total is not None)
        if total is None and coordinator.exhausted:
            raise BudgetExhausted(
                f"all {coordinator.terms.attempts} attempts at sums that privacy.spare_attempts allows are used up, and no more "
                f"was priced; the last failures: {'; '.join(reasons.values()) or 'too few clients'}"
            )
        self._record(first.released.round, members, total)
        vectors = [None if total is None else torch.from_numpy(total), *([ELSEWHERE] * len(members))]
        for client, vector in zip(members, vectors, strict=False):
            self._left_out.pop(client, None)
            assert vector is not None
            release = Contribution(client, (), "", 1.0, vector)
            yield Outcome(client, release, todo[client].policy_state, {}, remote=True)
        few = f"no set of {coordinator.terms.least} clients or more answered in full"
        for client in todo.keys() - set(members):
            yield self._without(todo[client], reasons.get(client, few))

    def _ready(self, told: bytes, asked: Mapping[int, TaskMessage]) -> dict[int, str]:
        """Send the round to all clients that have not failed twice; return why others are not ready."""
        reasons = {
            c: f"it failed in two rounds, the last time: {why}" for c, why in self.coordinator.left_out.items() if c in asked
        }
        answers = self.exchange.answers({c: (told, task_bytes(task)) for c, task in asked.items() if c not in reasons})
        for client, answer in answers.items():
            try:
                reason = self.coordinator.ready(client, self._content(answer, Kind.READY, asked[client]))
            except WireError as problem:
                reason = str(problem)
            if reason:
                reasons[client] = reason
        return reasons

    def _masked(self, request: bytes, asked: Mapping[int, TaskMessage]) -> dict[int, str]:
        """Send the request of an attempt to its set; return why clients failed."""
        number, reasons = next(iter(asked.values())).round, dict[int, str]()
        sent = set_bytes(self.run, number, request)
        for client, answer in self.exchange.answers({c: (sent, task_bytes(task)) for c, task in asked.items()}).items():
            try:
                reason = self.coordinator.masked(client, self._content(answer, Kind.MASKED, asked[client]))
            except WireError as problem:
                reason = str(problem)
                self.coordinator.failed(client, reason)
            if reason:
                reasons[client] = reason
        return reasons

    def _charge_unused(self, plans: SetPlans, *, opened: bool) -> None:
        """Charge the attempts without a sum that is used, also those before a crash: row i of the ledger is attempt i.

        Not where noise is seeded, whose releases a ledger counts once a round.

        Args:
            opened: whether the newest attempt has a sum, whose release charges it.
        """
        ledger = self.context.door.ledger
        if not isinstance(ledger, BudgetedLedger) or ledger.reproducible:
            return
        named = [row for row in self.coordinator.attempts.rows if "attempt" in row]
        for row in named[ledger.position[0] : len(named) - opened]:
            members = len(row["members"])
            self.context.door.charge_attempt(plans.of(members), members, row["round"])

    def _content(self, answer: bytes | str, kind: Kind, asked: TaskMessage) -> bytes:
        if isinstance(answer, str):
            raise WireError(answer)
        return read_masks(answer, kind, asked)

    def _record(self, round: int, members: Iterable[int], total: Integers | None) -> None:
        if self.receipts is None:
            return
        signed = {client: self.coordinator.vectors[client] for client in members}
        answers = tuple(Answer(client, digest.hex(), signature.hex()) for client, (digest, signature) in signed.items())
        named = (0, "") if total is None else (self.coordinator.attempts.newest, hashlib.sha256(total.tobytes()).hexdigest())
        self.receipts.record(Answers(round, answers, *named))
