"""Local training on one client: one loop, with explicit hooks that every method reuses.

A method brings a `Client`; the loop brings batches, learning-rate schedules and the optimiser. Gradients come from a
`GradientSource`: the batch mean, optionally clipped to V, or per-example DP-SGD (see `fedveil.release.dpsgd`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from fedveil.errors import ConfigError
from fedveil.tasks.classification import Classification
from fedveil.tasks.task import Column, HasColumns, Task
from fedveil.training.optimizer import Optimizer, OptimizerSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedveil.training.params import FlatModel

State = dict[str, Any]
"""Plain state: tensors, numbers and strings by name, so that it checkpoints without pickle."""

Schedule = Literal["constant", "cyclic", "stage-wise", "iterative"]
Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class LocalSpec:
    """What a client does in one round, known before its data are touched.

    Args:
        epochs: passes over the client's data, when `steps` is None.
        steps: exact number K of batches, cycling through reshuffled passes; overrides `epochs`.
        batch_size: examples a batch; the last batch of a pass may be short.
        batch_clip: V, the L2 bound on each batch gradient, or None.
        schedule: learning rate of step k (from 0) in round t (from 0) with K steps a round, as in Noisy-FedAvg, Theorem 3:
            constant lr; cyclic lr / (k + 1); stage-wise lr / (t + 1); iterative lr / (t K + k + 1).
        precision: of the forward pass and what it sends back through the network; gradients, optimiser, clip and noise are
            float32 always. `tf32` makes a difference on GPUs only, where the engine sets it.
        pairs: one example alone cannot be learned from, as under batch normalisation of vectors. The last batch of a pass, where
            it would be one example, joins the batch before it; an example that is alone all the same is normalised by the running
            statistics.
        loop: gradients of single examples are taken in a loop, for code that `torch.func.vmap` cannot run.
    """

    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    batch_clip: float | None = None
    schedule: Schedule = "constant"
    precision: Precision = "float32"
    pairs: bool = False
    loop: bool = False

    def steps_for(self, examples: int) -> int:
        """K, the number of steps of a client with that many examples (0 for an empty client)."""
        if examples == 0:
            return 0
        return self.steps if self.steps is not None else self.epochs * self.batches_for(examples)

    def batches_for(self, examples: int) -> int:
        """How many batches one pass over so many examples has."""
        whole, rest = divmod(examples, self.batch_size)
        return whole + int(rest > int(self.pairs and whole > 0))

    def batch_sizes(self, examples: int) -> list[int]:
        """The sizes of these batches, in order."""
        sizes = [self.batch_size] * self.batches_for(examples)
        sizes[-1:] = [examples - sum(sizes[:-1])]
        return sizes

    def gain(self, round: int, step: int, steps: int) -> float:
        """What of the power of noise in a step's gradient is in the update: with plain SGD; NaN for other optimisers."""
        o = self.optimizer
        plain = o.name == "sgd" and not o.momentum and not o.weight_decay
        return self.learning_rate(round, step, steps) ** 2 if plain else math.nan

    def learning_rate(self, round_index: int, step: int, steps: int) -> float:
        """The learning rate of step `step` of `steps` in round `round_index`."""
        return self.optimizer.lr * _SCHEDULES[self.schedule](round_index, step, steps)


_SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda t, k, steps: 1.0,
    "cyclic": lambda t, k, steps: 1.0 / (k + 1),
    "stage-wise": lambda t, k, steps: 1.0 / (t + 1),
    "iterative": lambda t, k, steps: 1.0 / (t * steps + k + 1),
}


class PublicPlan(Protocol):
    """What an objective may read of the plan: bounds and public values, fixed before the data are touched."""

    @property
    def clip(self) -> float:
        """C, the L2 bound on the whole update."""
        ...

    @property
    def broadcast(self) -> Mapping[str, Any]:
        """Public values from the server, by name."""
        ...


@dataclass
class Local:
    """The working set of one client's round; everything in it is private and dies with the round, except `state`.

    Attributes:
        model: the network; its `vector` [d] is being trained.
        start: w, the global model [d] this client received.
        support: coordinates that may leave this round as a bool mask [d], or None for all; fixed by the plan.
        state: this client's private state, where it is a `Remembering`, such as masks or personal weights; else empty.
        scratch: whatever an objective needs from one batch to the next; it dies with the round.
        normal: source of standard normals, by number; ask `noise`. client: its number.
        examples: how many the client has; under DP-SGD, which hides that, the public nominal number.
        plan: what will leave (a copy of the client's own), or None where that is decided from the update.
        data: examples and targets for `begin`, or None under DP-SGD, where they may touch nothing but the gradient source.
        extras: what leaves beside the update, by the names of the method's release layout; to be set until `finish` returns.
        noise_power: expected squared norm of the noise drawn inside training, per layer of the update [L]; None without any, NaN
            where it is not known; see `noised`.
        step: index of the current batch, from 0; `steps` is their number.
    """

    model: FlatModel
    start: Tensor
    spec: LocalSpec
    gradient: GradientSource
    generator: torch.Generator
    round: int = 0
    examples: int = 0
    steps: int = 0
    step: int = 0
    support: Tensor | None = None
    state: State = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    normal: Callable[[int], Tensor] | None = None
    noise_power: Tensor | None = None
    client: int = -1
    plan: PublicPlan | None = None
    data: tuple[Tensor, Tensor] | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)

    def noise(self, n: int) -> Tensor:
        """n fresh standard normals from the run's source of noise, for methods that add noise inside training."""
        if self.normal is None:
            raise ConfigError("this training loop was given no source of noise: set Local.normal")
        return self.normal(n)

    def noised(self, noise_power: Tensor) -> None:
        """Record that independent noise of that expected squared norm in each layer [L] went into the update, for the history."""
        self.noise_power = noise_power if self.noise_power is None else self.noise_power + noise_power

    def noised_gradient(self, noise_power: Tensor) -> None:
        """Record noise of that power [L] in this step's gradient, as plain SGD passes it on; NaN for other optimisers."""
        self.noised(noise_power * self.spec.gain(self.round, self.step, self.steps))

    def descend(self) -> None:
        """One optimiser step along `model.grad` at the scheduled learning rate."""
        if self.optimizer is None:
            self.optimizer = self.spec.optimizer.build()
        rate = self.spec.learning_rate(self.round, self.step, self.steps)
        self.optimizer.step(self.model.vector, self.model.grad, rate)


class GradientSource(Protocol):
    """How a batch becomes a gradient and how a pass is cut into batches."""

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Write the gradient of the batch into `local.model.grad` and return the loss."""
        ...

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the round, `local.steps` of them."""
        ...


class Client(Protocol):
    """What a method makes of local training; see `Plain` for the ordinary one.

    It has no memory: `local.state` is empty and cannot be written to, unless it is a `Remembering`. One object serves all
    clients, and an engine may take their batches in turns: what a client needs from one batch to the next is in its `Local`.
    Tensors are where `local.start` is, which may be a GPU.
    """

    def begin(self, local: Local) -> None:
        """Set the starting point; `local.model.vector` holds the global model."""
        ...

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Use one batch; returns its loss."""
        ...

    def finish(self, local: Local) -> Tensor:
        """The private update [d] that goes to the door."""
        ...


class Remembering:
    """The base of a `Client` that keeps a private state, `local.state`, from one of its rounds to its next.

    What it sends may tell where it took part before, so that no sample of clients counts as drawn afresh.
    """


@runtime_checkable
class HasPersonalModel(Protocol):
    """A client whose clients keep a model of their own."""

    def personal(self, model: Tensor, state: State) -> Tensor:
        """The model [d] that a client with this private state uses, given the global one [d]."""
        ...


@runtime_checkable
class HasMetrics(Protocol):
    """A policy or a client with figures of its own for the history."""

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Numbers, or lists of them, read off one state; a round records their mean over its clients.

        An attribute `columns` (see `HasColumns`) gives them titles and units; without it their names serve.
        A client reads private states, so its figures are diagnostics of simulations, as the training loss is.
        """
        ...


@dataclass(frozen=True)
class BatchGradient:
    """The gradient of a batch's loss, clipped to V when the spec says so."""

    task: Task = field(default_factory=Classification)

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        local.model.grad.zero_()
        with forward_precision(local.spec, x.device):
            output = local.model.output(x, by_running_statistics=local.spec.pairs and len(y) == 1)
        loss = self.task.loss(output.float(), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if local.spec.batch_clip is not None:
            clip_(local.model.grad, local.spec.batch_clip)
        return loss.detach()

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        import torch

        left = local.steps
        while left > 0:
            order = torch.randperm(len(y), generator=local.generator).to(x.device)
            sizes = local.spec.batch_sizes(len(y))
            shuffled = (torch.split(part.index_select(0, order), sizes) for part in (x, y))
            pairs = list(zip(*shuffled, strict=True))
            yield from pairs[:left]
            left -= len(pairs)


def forward_precision(spec: LocalSpec, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a network computes its output."""
    if spec.precision != "bf16":
        return nullcontext()
    import torch

    return torch.autocast(device.type, torch.bfloat16)


@dataclass(frozen=True)
class Proximal:
    """The gradient alpha (w_i - w) of FedProx's penalty, added to the (clipped) batch gradient."""

    alpha: float

    def __call__(self, local: Local) -> None:
        local.model.grad.add_(local.model.vector - local.start, alpha=self.alpha)


@dataclass(frozen=True)
class Plain:
    """Ordinary local training; `penalty(local)` may add the gradient of a regulariser to `local.model.grad`.

    The penalty is added after the batch gradient was clipped, as Noisy-FedProx does.
    """

    penalty: Callable[[Local], None] | None = None

    def begin(self, local: Local) -> None:
        """Start from the global model."""

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Gradient, penalty, optimiser step."""
        loss = local.gradient(local, x, y)
        if self.penalty is not None:
            self.penalty(local)
        local.descend()
        return loss

    def finish(self, local: Local) -> Tensor:
        """The difference between the trained and the received model."""
        return local.model.vector - local.start


@dataclass(frozen=True)
class Trained:
    """Any local training, with each client's model as it left it kept in the private state `trained`, to be measured there."""

    inner: Client

    def begin(self, local: Local) -> None:
        """As the inner one."""
        self.inner.begin(local)

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """As the inner one."""
        return self.inner.step(local, x, y)

    def finish(self, local: Local) -> Tensor:
        """The inner update; the trained model stays."""
        local.scratch["trained"] = local.model.vector.clone()
        return self.inner.finish(local)

    def personal(self, model: Tensor, state: State) -> Tensor:
        """What the client's last local training gave; the global model if it never took part."""
        trained: Tensor = state.get("trained", model)
        return trained

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Those of the inner one."""
        return self.inner.measures(state) if isinstance(self.inner, HasMetrics) else {}

    @property
    def columns(self) -> Sequence[Column]:
        """Those of the inner one."""
        return self.inner.columns if isinstance(self.inner, HasColumns) else ()


def remembers(client: Client) -> bool:
    """Whether clients keep a private state for their next rounds."""
    return isinstance(client.inner if isinstance(client, Trained) else client, Remembering)


def clip_(vector: Tensor, bound: float) -> Tensor:
    """Scale `vector` in place to L2 norm at most `bound` and return its norm before; zero stays zero."""
    import torch

    norm: Tensor = torch.linalg.vector_norm(vector)
    vector.mul_((bound / norm.clamp_min(1e-30)).clamp_max(1.0))
    return norm


def train(local: Local, x: Tensor, y: Tensor, objective: Client) -> tuple[Tensor, float]:
    """Train one client for one round.

    Args:
        local: the working set; its model is overwritten.
        x: examples [n, ...]. y: targets [n, ...]. n = 0 gives a zero update.

    Returns:
        The update [d] and the mean training loss (0.0 without examples). Both are private.
    """
    if len(x) != len(y):
        raise ConfigError(f"as many targets as examples are needed, got {len(x)} examples and {len(y)} targets")
    local.model.grad.zero_()  # what the client before left there would be added to, where an objective does not call `gradient`
    local.examples = getattr(local.gradient, "examples", len(y))
    local.steps = getattr(local.gradient, "steps", None) or local.spec.steps_for(len(y))
    update, total = follow(local, local.gradient.batches(local, x, y), objective)
    own = getattr(local.gradient, "losses", None)
    return update, float(total) / max(local.steps, 1) if own is None else sum(own) / max(len(own), 1)


def follow(local: Local, batches: Iterable[tuple[Tensor, Tensor]], objective: Client) -> tuple[Tensor, Tensor]:
    """The loop of local training: the update [d], and the sum of the batches' losses.

    A model of n stacked clients gives updates [n, d] and sums [n].
    """
    local.model.load(local.start)
    objective.begin(local)
    total = local.start.new_zeros(())
    for step, (x, y) in enumerate(batches):
        local.step = step
        total = total + objective.step(local, x, y)
    return objective.finish(local), total
