"""One client's round, which every engine runs: plan, train, seal, observe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

import numpy as np
import torch

from fedveil.errors import ConfigError, UpdateRefused
from fedveil.federation.evidence import cells_by_record, evaluation_counts
from fedveil.federation.isolated import LONGEST, ChildFailed, ended_after, forked, seed_generators
from fedveil.federation.plain_state import is_storable, mapped
from fedveil.gradients.per_example import per_example_gradients
from fedveil.mechanism.cost import promises
from fedveil.mechanism.plan import COUNTS, LocalDpSgd, Plan, Raw, Released, Upload, copied, in_shares, step_of
from fedveil.methods.run_cost import Planner
from fedveil.release.dpsgd import Counting, Pass, PerExampleGradient, counts_of_steps, made_here
from fedveil.release.release_layout import EvaluationCounts
from fedveil.release.sealed import Contribution, RunningSum, SealedUpload
from fedveil.tasks.classification import Classification
from fedveil.tasks.task import Task
from fedveil.training.local import BatchGradient, Client, GradientSource, Local, Plain, State, remembers, train

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.clients import Clients
    from fedveil.release.door import CompiledPlan, Door
    from fedveil.release.noise import Randomness
    from fedveil.training.local import LocalSpec
    from fedveil.training.params import FlatModel


Isolation = Literal["process", "pass", "copy", "none"]


def _itself(source: GradientSource) -> GradientSource:
    return source


@dataclass(frozen=True)
class Context:
    """State that all clients of a run share; nothing in it changes between rounds.

    `summed`: uploads are added before anyone sees them (aggregate and final view). `buffers`: the initial batch statistics.
    `gradients`: wraps each client's source of gradients, for engines. `task`: the learning task.
    `evaluation`: counts on the clients' own `tests`, released along with each update.
    `in_turns`: clients are interleaved, and their engine seeds what layers draw.
    `rehearsal`: the examples are public and nothing is released, so failures raise.
    `isolation`: user-defined code sees each client's data in a child `process`; also each `pass` of DP-SGD in another child;
    or it runs on a `copy` of itself, or directly (`none`).
    `in_shares`: each client adds a share of the noise on the sum.
    `longest` are the seconds that a client's training may take; one that takes longer has failed.
    Training happens on the device of `model` and `clients`; plans, door, tests and all states stay on the CPU.
    """

    model: FlatModel
    clients: Clients
    spec: LocalSpec
    objective: Client
    policy: Planner
    door: Door
    randomness: Randomness
    summed: bool
    buffers: Tensor
    gradients: Callable[[GradientSource], GradientSource] = _itself
    task: Task = field(default_factory=Classification)
    in_turns: bool = False
    evaluation: EvaluationCounts | None = None
    tests: Clients | None = None
    rehearsal: bool = False
    isolation: Isolation = "none"
    in_shares: bool = False
    longest: float | None = None

    def plan(self, released: Released, state: State) -> Plan | Raw:
        """Return the policy's plan given the earlier releases, extended by the counts of an evaluation."""
        plan = self.policy.plan(released, state)
        return plan if self.evaluation is None else self.evaluation.added_to(plan, self.door.layout)

    def shared(self, plan: Plan | Raw, clients: int) -> Plan | Raw:
        """Return the plan that each executes in a round of so many clients: with its share of the noise, if it is in shares."""
        if not (self.in_shares and isinstance(plan, Plan)):
            return plan
        return in_shares(plan, clients - self.door.known_noise_terms)

    def observed(self, upload: Upload, released: Released) -> Upload:
        """Return what the policy observes: the upload under the policy's own plan, with the public values of that time."""
        plan = upload.plan if self.evaluation is None else self.evaluation.removed_from(upload.plan)
        return observed(replace(upload, plan=plan), released)

    @property
    def followed(self) -> bool:
        """Return whether an engine, or a replay, intercepts every request for a gradient."""
        return self.gradients is not _itself

    @property
    def in_children(self) -> bool:
        """Return whether user-defined code sees private data in child processes only; intercepted gradients need this process."""
        return self.isolation in ("process", "pass") and not self.followed


@dataclass(frozen=True)
class ClientTask:
    """One client's part in one round.

    `common` is the plan of the round if uploads are summed before anyone sees them. Otherwise the client plans from
    `policy_state`, which holds only the client's own earlier releases. `private` never leaves the client. `buffers` are the batch
    statistics of the global model, released or estimated on public examples; None for the initial ones.
    """

    client: int
    released: Released
    weight: float
    common: Plan | Raw | None = None
    policy_state: State = field(default_factory=dict)
    private: State = field(default_factory=dict)
    buffers: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a client's round, its release still sealed.

    `loss`, `noise_power` and `error` are private diagnostics of simulations. `noise_power`: power of the noise drawn inside
    training under a plan that promises nothing, per layer of what was sent [L] (see `Local`). `error`: the reason why the client
    contributes nothing of its own; under a plan that promises anything it releases zero with noise. `remote`: the client ran on
    another machine, so only its release is known, not loss, examples or private state; without a release, it may be back in the
    next round.
    """

    client: int
    release: SealedUpload | Contribution | None
    policy_state: State
    private: State
    loss: float = 0.0
    examples: int = 0
    seconds: float = 0.0
    error: str = ""
    noise_power: Tensor | None = None
    remote: bool = False


@dataclass(frozen=True)
class Work:
    """Result of a client's training before the door: all private, and on the CPU."""

    plan: Plan | Raw
    update: Tensor
    loss: float
    private: State
    buffers: Tensor
    examples: int
    noise_power: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Failed training: its plan and the reason, which stays in the client's own log.

    noise: released instead under DP-SGD: the noise of all steps, as of a client without examples.
    """

    plan: Plan | Raw
    reason: str
    noise: Work | None = None


def client_round(context: Context, task: ClientTask) -> Outcome:
    """Plan before the data are read, train, seal the release, and let the policy observe it.

    A client whose training fails keeps its old private state, and releases zero with noise if its plan promises anything.
    A policy that fails to plan ends the run.
    """
    start = time.perf_counter()
    return sealed_outcome(context, task, attempted(context, task, planned(context, task)), start)


def planned(context: Context, task: ClientTask) -> Plan | Raw:
    """Return the plan of the coming release, made before the data are read."""
    if task.common is not None:
        return task.common
    return context.plan(replace(task.released, client=task.client), task.policy_state)


def attempted(context: Context, task: ClientTask, plan: Plan | Raw) -> Work | Failure:
    """Train locally under the plan, isolated as the context asks, and return the result or the failure."""
    if context.in_children:
        return _attempted_in_child(context, task, plan)
    if context.isolation == "copy" and (context.in_turns or not context.followed):
        return _attempted_on_copy(context, task, plan)
    return _attempted_here(context, task, plan)


def _attempted_here(context: Context, task: ClientTask, plan: Plan | Raw) -> Work | Failure:
    try:
        with ended_after(context.longest):
            return trained(context, task, plan)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if context.rehearsal:
            raise
        return failure(context, task, plan, _reason(error))


def _attempted_in_child(context: Context, task: ClientTask, plan: Plan | Raw) -> Work | Failure:
    """Train locally under the plan in a child process, and return the result or the failure; sealing is left to the parent."""

    def act() -> dict[str, Any]:
        _seed_generators(context, task)
        try:
            work = trained(context, task, plan)
        except BaseException as error:
            return {"reason": _reason(error)}
        values = {field.name: getattr(work, field.name) for field in fields(Work) if field.name != "plan"}
        return values | {"loss": float(work.loss), "extras": dict(work.extras)}

    if isinstance(plan, LocalDpSgd):
        import_module("torch.fx.experimental.symbolic_shapes")  # else vmap loads it in each child: 0.7 s
    try:
        result = forked(act, context.longest or LONGEST)
    except ChildFailed as failed:
        result = {"reason": str(failed)}
    return failure(context, task, plan, result["reason"]) if "reason" in result else Work(plan, **result)


def _made_in_child(context: Context, task: ClientTask, act: Pass, *number: int) -> dict[str, Any]:
    """Make a pass over private examples in a process forked for it."""

    def seeded() -> dict[str, Any]:
        _seed_generators(context, task, *number)
        return act()

    return forked(seeded)


def _attempted_on_copy(context: Context, task: ClientTask, plan: Plan | Raw) -> Work | Failure:
    """Train locally under the plan on copies of the model, objective and task, and return the result or the failure."""
    try:
        model = context.model if context.in_turns else context.model.independent_copy()  # in turns each client already has a copy
        objective, learned = deepcopy((context.objective, context.task))
    except Exception as error:
        return failure(context, task, plan, f"the model, the method or the task cannot be copied ({_reason(error)})")
    own = replace(context, model=model, objective=objective, task=learned)
    _seed_generators(own, task)
    return _attempted_here(own, task, plan)


def _seed_generators(context: Context, task: ClientTask, *number: int) -> None:
    """Seed generators attached to the model, method or task by client and round; otherwise each copy would draw the same.

    Args:
        number: of a pass that runs in a child process.
    """
    seed = context.randomness.derive("generators", task.released.round, task.client, *number)
    seed_generators(seed, context.model.module, context.objective, context.task)


def failure(context: Context, task: ClientTask, plan: Plan | Raw, reason: str) -> Failure:
    """Return a `Failure`; under DP-SGD, whose noise is part of training, it includes the noise of all steps."""
    if not isinstance(plan, LocalDpSgd):
        return Failure(plan, reason)
    return Failure(plan, reason, trained(replace(context, objective=Plain()), task, plan, on_nothing=True))


def sealed_outcome(
    context: Context, task: ClientTask, work: Work | Failure, start: float, terms: CompiledPlan | None = None
) -> Outcome:
    """Seal the result of training at the door and let the client's policy observe it.

    The release happens with the round's others.

    Args:
        terms: compiled plan, passed in if other clients share it.
    """
    door, made = context.door, work.noise if isinstance(work, Failure) else work
    problems = [work.reason] if isinstance(work, Failure) else []
    release: SealedUpload | Contribution | None = None
    if not problems or promising(work.plan, door):
        try:
            release = (door.seal if context.summed else door.seal_upload)(
                None if made is None else made.update,
                work.plan if terms is None else terms,
                task.client,
                task.released.round,
                extras={} if made is None else made.extras,
                weight=task.weight,
                buffers=None if isinstance(work, Failure) else work.buffers,
            )
            problems.append(release.refusal)
        except UpdateRefused as refused:
            problems.append(str(refused))
    problem = problems[0] if problems else ""
    state = task.policy_state
    if isinstance(release, SealedUpload):
        state = context.policy.observe(state, context.observed(release.upload, task.released))
    seconds = time.perf_counter() - start
    if isinstance(work, Failure) or problem:
        return Outcome(task.client, release, state, task.private, seconds=seconds, error=problem)
    return Outcome(task.client, release, state, work.private, work.loss, work.examples, seconds, noise_power=work.noise_power)


def summed(outcome: Outcome, total: RunningSum) -> Outcome:
    """Return the outcome after adding its contribution to a sum of integers to `total`."""
    release = outcome.release
    if not isinstance(release, Contribution):
        return outcome
    sealed = total.add(release.sealed)
    return outcome if sealed is release.sealed else replace(outcome, release=replace(release, sealed=sealed))


def observed(upload: Upload, released: Released) -> Upload:
    """Return what a policy observes: the upload with the values that were public when it was planned."""
    return replace(upload, start=released.model, public_loss=released.public_loss)


def promising(plan: Plan | Raw, door: Door) -> bool:
    """Return whether the plan promises anything about the release, at the door or in training."""
    return isinstance(plan, Plan) and (isinstance(plan, LocalDpSgd) or promises(plan, door.layout))


def trained(context: Context, task: ClientTask, plan: Plan | Raw, *, on_nothing: bool = False) -> Work:
    """Train locally under the plan, on the context's device; `task.released.model` may already be there.

    Args:
        on_nothing: train as if the client had no examples.
    """
    x, y = (part[:0] if on_nothing else part for part in context.clients.examples(task.client))
    t = task.released.round
    model, device = context.model, context.model.vector.device
    forks = context.isolation == "pass" and context.in_children
    made = partial(_made_in_child, context, task) if forks else made_here
    counts: dict[str, Tensor] = {}
    if not on_nothing or isinstance(plan, LocalDpSgd):
        counts = made(partial(evaluated, context, task, on_nothing=on_nothing, single=isinstance(plan, LocalDpSgd)))
    model.load_buffers(task.buffers if task.buffers is not None else task.private.get("buffers", context.buffers))
    executed = copied(plan, device) if isinstance(plan, Plan) else None
    source: GradientSource = BatchGradient(context.task)
    dp_sgd = None if executed is None else step_of(executed)
    if dp_sgd is not None:
        gradients = partial(per_example_gradients, losses_of=context.task.losses_in_full, loop=context.spec.loop)
        key, rehearsal = (t, task.client), context.rehearsal
        source = PerExampleGradient(
            dp_sgd, context.randomness, key, gradients, context.task, rehearsal, made, forks and context.spec.loop
        )
    source = source if on_nothing else context.gradients(source)
    if counts and isinstance(plan, LocalDpSgd):
        noisy = counts_of_steps(cast("Counting", source), counts[COUNTS], plan.extras[COUNTS])
        counts = {COUNTS: noisy.reshape(context.door.extras[COUNTS])}
    local = Local(
        model,
        task.released.model.to(device, copy=True),
        context.spec,
        source,
        context.randomness.generator("batches", t, task.client),
        round=t,
        support=None if executed is None else executed.support,
        state=_state_of(context, task),
        normal=_Normals(context.randomness, (t, task.client), device),
        client=task.client,
        plan=executed,
        data=None if dp_sgd is not None else (x, y),
    )
    secret = dp_sgd is not None  # one example fewer would shift later draws
    with nullcontext() if context.in_turns else context.randomness.forward(device, t, task.client, secret=secret):
        update, loss = train(local, x, y, context.objective)
    buffers, hidden = model.buffers(), dict[str, Any]()
    if "trained" in local.scratch:
        hidden["trained"] = local.scratch["trained"]
    if buffers.numel():
        hidden["buffers"] = buffers
    if remembers(context.objective):
        local.state.update(hidden)
        hidden = local.state
    noise_power = None if promising(plan, context.door) else local.noise_power
    update, state, noise_power, extras = _on_cpu(model, (update, hidden, noise_power, local.extras | counts))
    _check_storable(state, noise_power, len(model.layout))
    return Work(plan, update, loss, state, buffers.to("cpu"), len(y), noise_power, extras)


def _state_of(context: Context, task: ClientTask) -> Any:
    """Return a copy of the private state for clients with hidden state, as the original may be being saved; others have none."""
    device = context.model.vector.device
    if not remembers(context.objective):
        return MappingProxyType[str, Any]({})
    return mapped(lambda tensor: tensor.to(device, copy=True), task.private)


def evaluated(context: Context, task: ClientTask, *, single: bool = False, on_nothing: bool = False) -> dict[str, Tensor]:
    """Return counts on the client's own test examples, if the run has them; this loads the global model.

    Args:
        single: return the counts of each example, flat [n, m]. on_nothing: as if the client had no examples.
    """
    if context.evaluation is None:
        return {}
    tests, most = context.tests or context.clients, 0 if on_nothing or context.tests is None else context.evaluation.examples
    x, y = (part[:most] for part in tests.examples(task.client))
    context.model.load(task.released.model)
    context.model.load_buffers(context.buffers if task.buffers is None else task.buffers)
    if single:
        return {COUNTS: cells_by_record(context.task, context.model, x, y, strict=context.rehearsal)}
    return {COUNTS: evaluation_counts(context.task, context.model, x, y)}


def _check_storable(state: Any, noise_power: Any, layers: int) -> None:
    """Refuse state that could not be saved or reported: here only this client fails, later the whole run would."""
    power = noise_power is None or (_dense(noise_power) and noise_power.shape == (layers,) and noise_power.is_floating_point())
    if not power or type(state) is not dict:
        raise ConfigError("Local.state must stay a dictionary, and Local.noise_power one number for each layer")
    if not (_is_plain(state) and is_storable(state)):
        raise ConfigError(
            "Local.state may hold dense tensors, numbers and strings, in dictionaries, lists and tuples; no other kind"
        )


def _dense(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(part) for key, part in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, np.generic):
        return isinstance(value.item(), bool | int | float | str)
    if _dense(value):
        return not (value.is_complex() or value.is_quantized)
    return value is None or isinstance(value, bool | int | float | str)


def _on_cpu(model: FlatModel, value: Any) -> Any:
    """Return plain state on the CPU; tensors in the model's memory are copied, because the next client reuses it."""
    memory = {part.untyped_storage().data_ptr() for part in (model.vector, model.grad)}

    def own(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=_dense(tensor) and tensor.untyped_storage().data_ptr() in memory)

    return mapped(own, value)


class _Normals:
    """Source of standard normals for one client's round; each call draws fresh ones."""

    def __init__(self, randomness: Randomness, key: tuple[int, int], device: torch.device) -> None:
        self._randomness, self._key, self._device, self._calls = randomness, key, device, 0

    def __call__(self, n: int) -> Tensor:
        self._calls += 1
        return self._randomness.normal(n, "training", *self._key, self._calls).to(self._device)


def _reason(error: BaseException) -> str:
    try:
        text = str(error) or type(error).__name__
    except Exception:  # the exception's own text fails, too
        return type(error).__name__
    return text if type(error).__module__.startswith("fedveil") else f"{type(error).__name__}: {text}"


class Engine(Protocol):
    """Runner of client rounds; a context manager, because workers must end with the run."""

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """Yield one outcome per task, in any order."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
