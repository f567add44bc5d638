"""Local training on one client: one loop, with hooks for methods.

A method provides a `Client`; the loop provides batches, learning-rate schedules and the optimiser. Gradients come from a
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
"""Plain state: tensors, numbers and strings by name, which are checkpointed without pickle."""

Schedule = Literal["constant", "cyclic", "stage-wise", "iterative"]
Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class LocalSpec:
    """Specification of a client's round, fixed before its data are touched.

    Args:
        epochs: passes over the client's data, when `steps` is None.
        steps: exact number K of batches, cycling through reshuffled passes; overrides `epochs`.
        batch_size: examples per batch; the last batch of a pass may be short.
        batch_clip: V, the L2 bound on each batch gradient, or None.
        schedule: learning rate of step k (from 0) in round t (from 0) with K steps per round, as in Noisy-FedAvg, Theorem 3:
            constant lr; cyclic lr / (k + 1); stage-wise lr / (t + 1); iterative lr / (t K + k + 1).
        precision: of the forward and backward pass through the network; gradients, optimiser, clip and noise are always float32.
            `tf32` has an effect on GPUs only, where the engine sets it.
        pairs: the network cannot learn from a single example, as with batch normalisation of vectors. A last batch of one example
            is merged into the batch before it; if that is impossible, the example is normalised by the running statistics.
        loop: compute gradients of single examples in a loop, for code that `torch.func.vmap` cannot run.
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
        """Return K, the number of steps of a client with this many examples (0 for an empty client)."""
        if examples == 0:
            return 0
        return self.steps if self.steps is not None else self.epochs * self.batches_for(examples)

    def batches_for(self, examples: int) -> int:
        """Return the number of batches in one pass over this many examples."""
        whole, rest = divmod(examples, self.batch_size)
        return whole + int(rest > int(self.pairs and whole > 0))

    def batch_sizes(self, examples: int) -> list[int]:
        """Return the sizes of these batches, in order."""
        sizes = [self.batch_size] * self.batches_for(examples)
        sizes[-1:] = [examples - sum(sizes[:-1])]
        return sizes

    def gain(self, round: int, step: int, steps: int) -> float:
        """Return the factor from the power of noise in a step's gradient to that in the update; NaN unless it is plain SGD."""
        o = self.optimizer
        plain = o.name == "sgd" and not o.momentum and not o.weight_decay
        return self.learning_rate(round, step, steps) ** 2 if plain else math.nan

    def learning_rate(self, round_index: int, step: int, steps: int) -> float:
        """Return the learning rate of step `step` of `steps` in round `round_index`."""
        return self.optimizer.lr * _SCHEDULES[self.schedule](round_index, step, steps)


_SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda t, k, steps: 1.0,
    "cyclic": lambda t, k, steps: 1.0 / (k + 1),
    "stage-wise": lambda t, k, steps: 1.0 / (t + 1),
    "iterative": lambda t, k, steps: 1.0 / (t * steps + k + 1),
}


class PublicPlan(Protocol):
    """Part of the plan that a client may read: bounds and public values, fixed before the data are touched."""

    @property
    def clip(self) -> float:
        """Return C, the L2 bound on the whole update."""
        ...

    @property
    def broadcast(self) -> Mapping[str, Any]:
        """Return public values from the server, by name."""
        ...


@dataclass
class Local:
    """Working set of one client's round; it is private and is dropped after the round, except `state`.

    Attributes:
        model: the network; its `vector` [d] is being trained.
        start: w, the global model [d] that this client received.
        support: coordinates that may be released this round as a bool mask [d], or None for all; fixed by the plan.
        state: private state of a `Remembering` client, such as masks or personal weights; else empty.
        scratch: values that a client needs between batches; they are dropped after the round.
        normal: source of n standard normals; call `noise` instead. client: the client's number.
        examples: number of the client's examples; the public nominal number under DP-SGD, which hides the true one.
        plan: a copy of the client's plan, or None if the plan is made from the update.
        data: examples and targets for `begin`, or None under DP-SGD, where only the gradient source may use them.
        extras: extra vectors of the release, by the names of the method's release layout; set them before `finish` returns.
        noise_power: expected squared norm of the noise drawn inside training, per layer of the update [L]; None without noise,
            NaN if it is unknown; see `noised`.
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
        """Return n fresh standard normals from the run's source of noise, for methods that add noise inside training."""
        if self.normal is None:
            raise ConfigError("this training loop was given no source of noise: set Local.normal")
        return self.normal(n)

    def noised(self, noise_power: Tensor) -> None:
        """Record independent noise in the update for the history, by its expected squared norm per layer [L]."""
        self.noise_power = noise_power if self.noise_power is None else self.noise_power + noise_power

    def noised_gradient(self, noise_power: Tensor) -> None:
        """Record noise of this power [L] in the step's gradient, as plain SGD transfers it to the update; NaN otherwise."""
        self.noised(noise_power * self.spec.gain(self.round, self.step, self.steps))

    def descend(self) -> None:
        """Make one optimiser step along `model.grad` at the scheduled learning rate."""
        if self.optimizer is None:
            self.optimizer = self.spec.optimizer.build()
        rate = self.spec.learning_rate(self.round, self.step, self.steps)
        self.optimizer.step(self.model.vector, self.model.grad, rate)


class GradientSource(Protocol):
    """Computes the gradient of a batch, and splits a round into batches."""

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Write the gradient of the batch into `local.model.grad` and return the loss."""
        ...

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the `local.steps` batches of the round."""
        ...


class Client(Protocol):
    """Local training of a method; see `Plain` for the ordinary one.

    It has no memory: `local.state` is empty and read-only, unless the client is a `Remembering`. One object serves all clients,
    and an engine may interleave their batches, so values needed between batches belong into `Local`. Tensors are on the device
    of `local.start`, which may be a GPU.
    """

    def begin(self, local: Local) -> None:
        """Prepare the round; `local.model.vector` holds the global model."""
        ...

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch and return its loss."""
        ...

    def finish(self, local: Local) -> Tensor:
        """Return the private update [d] for the door."""
        ...


class Remembering:
    """Base of a `Client` with a private state, `local.state`, that persists between its rounds.

    Its uploads may reveal in which rounds it took part, so samples of clients do not count as independent.
    """


@runtime_checkable
class HasPersonalModel(Protocol):
    """Client with personal models."""

    def personal(self, model: Tensor, state: State) -> Tensor:
        """Return the model [d] that a client with this private state uses, given the global model [d]."""
        ...


@runtime_checkable
class HasMetrics(Protocol):
    """Policy or client with custom figures for the history."""

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Return numbers, or lists of numbers, computed from one state; a round records their mean over its clients.

        An attribute `columns` (see `HasColumns`) gives them titles and units; otherwise their names are used.
        A client reads private states, so its figures are diagnostics of simulations, like the training loss.
        """
        ...


@dataclass(frozen=True)
class BatchGradient:
    """Gradient of a batch's loss, clipped to V if the spec sets `batch_clip`."""

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

        remaining = local.steps
        while remaining > 0:
            order = torch.randperm(len(y), generator=local.generator).to(x.device)
            sizes = local.spec.batch_sizes(len(y))
            shuffled = (torch.split(part.index_select(0, order), sizes) for part in (x, y))
            pairs = list(zip(*shuffled, strict=True))
            yield from pairs[:remaining]
            remaining -= len(pairs)


def forward_precision(spec: LocalSpec, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a network computes its output."""
    if spec.precision != "bf16":
        return nullcontext()
    import torch

    return torch.autocast(device.type, torch.bfloat16)


@dataclass(frozen=True)
class Proximal:
    """Gradient alpha (w_i - w) of FedProx's penalty, added to the (clipped) batch gradient."""

    alpha: float

    def __call__(self, local: Local) -> None:
        local.model.grad.add_(local.model.vector - local.start, alpha=self.alpha)


@dataclass(frozen=True)
class Plain:
    """Ordinary local training; `penalty(local)` may add the gradient of a regulariser to `local.model.grad`.

    The penalty is added after the batch gradient is clipped, as in Noisy-FedProx.
    """

    penalty: Callable[[Local], None] | None = None

    def begin(self, local: Local) -> None:
        """Start from the global model."""

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Compute the gradient, add the penalty, and make an optimiser step."""
        loss = local.gradient(local, x, y)
        if self.penalty is not None:
            self.penalty(local)
        local.descend()
        return loss

    def finish(self, local: Local) -> Tensor:
        """Return the difference between the trained and the received model."""
        return local.model.vector - local.start


@dataclass(frozen=True)
class Trained:
    """Local training that stores each client's trained model in the private state `trained`, where it can be measured."""

    inner: Client

    def begin(self, local: Local) -> None:
        """Begin as the inner client does."""
        self.inner.begin(local)

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch as the inner client does."""
        return self.inner.step(local, x, y)

    def finish(self, local: Local) -> Tensor:
        """Store the trained model and return the inner client's update."""
        local.scratch["trained"] = local.model.vector.clone()
        return self.inner.finish(local)

    def personal(self, model: Tensor, state: State) -> Tensor:
        """Return the model of the client's last local training; the global model if it never took part."""
        trained: Tensor = state.get("trained", model)
        return trained

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Return the figures of the inner client."""
        return self.inner.measures(state) if isinstance(self.inner, HasMetrics) else {}

    @property
    def columns(self) -> Sequence[Column]:
        """Return the columns of the inner client."""
        return self.inner.columns if isinstance(self.inner, HasColumns) else ()


def remembers(client: Client) -> bool:
    """Return whether clients have a private state that persists between rounds."""
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
    local.model.grad.zero_()  # an objective that does not call `gradient` would add to the previous client's values
    local.examples = getattr(local.gradient, "examples", len(y))
    local.steps = getattr(local.gradient, "steps", None) or local.spec.steps_for(len(y))
    update, total = follow(local, local.gradient.batches(local, x, y), objective)
    losses = getattr(local.gradient, "losses", None)
    return update, float(total) / max(local.steps, 1) if losses is None else sum(losses) / max(len(losses), 1)


def follow(local: Local, batches: Iterable[tuple[Tensor, Tensor]], objective: Client) -> tuple[Tensor, Tensor]:
    """Run the loop of local training; return the update [d] and the sum of the batches' losses.

    A model of n stacked clients gives updates [n, d] and sums [n].
    """
    local.model.load(local.start)
    objective.begin(local)
    total = local.start.new_zeros(())
    for step, (x, y) in enumerate(batches):
        local.step = step
        total = total + objective.step(local, x, y)
    return objective.finish(local), total
