"""The input and the output of attacks.

A `CapturedUpload` contains released values only. `Knowledge` contains everything else that the attacker knows, and every
`Reconstruction` names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedveil.errors import ConfigError

ModelFn = Callable[[], nn.Module]
Noise = Mapping[str, "float | Tensor"]


@dataclass(frozen=True)
class KnownTraining:
    """The part of a client's local training that an attacker simulates.

    steps: optimizer steps K >= 1. batch: examples per step, None = all of them. lr: learning rate > 0.
    order: indices of the examples of each step; None = consecutive batches, the same in every epoch (the order is unknown).
    momentum, weight_decay: of SGD. batch_clip: L2 bound on each step's gradient. rates: the rate of each step, with mean `lr`.
    """

    steps: int
    lr: float
    batch: int | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    order: tuple[tuple[int, ...], ...] | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_clip: float | None = None
    rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.lr < float("inf") or (self.batch is not None and self.batch < 1):
            raise ConfigError(f"KnownTraining needs steps >= 1, lr > 0 and batch >= 1, got {self.steps}, {self.lr}, {self.batch}")
        for name, entries in (("order", self.order), ("rates", self.rates)):
            if entries is not None and len(entries) != self.steps:
                raise ConfigError(f"KnownTraining.{name} lists {len(entries)} entries for {self.steps} steps; give one per step")
        if self.optimizer == "adam" and (self.momentum or self.weight_decay):
            raise ConfigError("KnownTraining: Adam is simulated without momentum and weight_decay settings; leave them at 0")

    @property
    def plain(self) -> bool:
        """Return whether the effective gradient is a single gradient over all examples."""
        once = self.steps == 1 and self.optimizer == "sgd" and self.batch is None and self.order is None
        return once and not self.weight_decay and self.batch_clip is None


@dataclass(frozen=True)
class Clip:
    """The L2 bounds that the door enforces on an update, in the units of the upload: first per parameter, then on the whole."""

    whole: float = float("inf")
    layers: Mapping[str, float] | None = None

    def scaled(self, factor: float) -> Clip:
        """Return the bounds multiplied by a factor."""
        return Clip(self.whole * factor, self.layers and {name: bound * factor for name, bound in self.layers.items()})


@dataclass(frozen=True)
class CapturedUpload:
    """One released message of a client.

    tensors: by parameter name; a missing name was not sent. n_examples: number of examples that it was computed from.
    local: how the client trained (None for a gradient). noise_std: std of the added noise by name, in units of `tensors`.
    sent_mask: booleans by name, False where an entry was withheld. bn_mode: whether normalisation used the batch ("train")
    or the running statistics ("eval"). signal_norm: L2 norm before noise, for the record; no attack reads it.
    """

    tensors: Mapping[str, Tensor]
    kind: Literal["gradient", "delta", "weights"] = "gradient"
    n_examples: int = 1
    local: KnownTraining | None = None
    noise_std: Noise | None = None
    sent_mask: Mapping[str, Tensor] | None = None
    bn_mode: Literal["train", "eval"] = "eval"
    buffers: Mapping[str, Tensor] | None = None
    signal_norm: float | None = None

    def __post_init__(self) -> None:
        if self.n_examples < 1:
            raise ConfigError(f"an upload comes from at least one example, got n_examples = {self.n_examples}")
        for name, value in self.tensors.items():
            if not bool(torch.isfinite(value).all()):
                raise ConfigError(f"upload: {name} holds NaN or infinity; an attack needs finite values")

    @property
    def noise_ratio(self) -> float | None:
        """r = |noise| / |signal| = sigma sqrt(d) / |g|: about 0.1 is nearly transparent, 10 is the floor.

        Infinite if there is noise but no signal; None if unknown.
        """
        if self.noise_std is None or self.signal_norm is None:
            return None
        power = sum(
            float((torch.as_tensor(s, dtype=torch.float64).expand(self.tensors[k].shape) ** 2).sum())
            for k, s in self.noise_std.items()
        )
        if self.signal_norm == 0:
            return math.inf if power else None
        return float(power**0.5 / self.signal_norm)


@dataclass(frozen=True)
class Knowledge:
    """The knowledge of an attacker in addition to the upload and the model that it was computed from; None = not known.

    labels: class of each example, int64 (n,). n: number of examples. local: the client's training.
    buffers: normalisation statistics of the client. noise_std, mask: as in `CapturedUpload`; clip: the bounds on the update; each
    of these three makes an attack adaptive. aux_inputs: examples from the same distribution, (m, *shape).
    """

    labels: Tensor | None = None
    n: int | None = None
    local: KnownTraining | None = None
    buffers: Mapping[str, Tensor] | None = None
    noise_std: Noise | None = None
    mask: Mapping[str, Tensor] | None = None
    clip: Clip | None = None
    aux_inputs: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def adaptive(self) -> bool:
        """Return whether the attacker uses knowledge about the defence."""
        return self.noise_std is not None or self.mask is not None or self.clip is not None


@dataclass(frozen=True)
class Bounds:
    """The shape of an example and its range in the model's units, per channel or common: pixel 0 is `low`, pixel 1 is `high`."""

    shape: tuple[int, ...]
    low: float | tuple[float, ...] = 0.0
    high: float | tuple[float, ...] = 1.0

    def edges(self) -> tuple[Tensor, Tensor]:
        """Return both ends of the range, shaped to broadcast against (n, *shape)."""
        low, high = (
            torch.as_tensor(v, dtype=torch.float32).reshape(-1, *[1] * (len(self.shape) - 1)) for v in (self.low, self.high)
        )
        if not bool((low < high).all()):
            raise ConfigError(f"bounds need low < high, got {self.low} and {self.high}")
        return low, high

    def images(self, x: Tensor) -> Tensor:
        """Convert model inputs to images, clamped to [0, 1]; NaN becomes 0."""
        low, high = self.edges()
        return ((x.detach() - low) / (high - low)).nan_to_num(0.0, 1.0, 0.0).clamp(0, 1)

    def inputs(self, images: Tensor) -> Tensor:
        """Convert images in [0, 1] to model inputs."""
        low, high = self.edges()
        return images * (high - low) + low


@dataclass(frozen=True)
class AttackStep:
    """The progress of a running attack; `loss` is the minimised value."""

    attack: str
    trial: int
    trials: int
    step: int
    steps: int
    loss: float


OnStep = Callable[[AttackStep], None]


@dataclass(frozen=True)
class Trial:
    """The result of one start: the candidate, its matching loss, and the reason for stopping."""

    x: Tensor
    y: Tensor
    loss: float
    steps: int
    closures: int
    stop_reason: str


@dataclass(frozen=True)
class Reconstruction:
    """A reconstruction: the trial with the smallest matching loss, and the knowledge that it used.

    x: (n, *shape) in the model's units, `images` the same in [0, 1]. y: labels, int64 (n,).
    noise_ratio: r of the (first) upload. seconds: wall time of all trials.
    """

    attack: str
    x: Tensor
    images: Tensor
    y: Tensor
    trial_losses: tuple[float, ...]
    chosen: int
    steps: int
    closures: int
    seconds: float
    stop_reason: str
    knowledge: tuple[str, ...]
    adaptive: bool
    seed: int
    noise_ratio: float | None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps_per_second(self) -> float:
        """Optimizer steps of all trials per second of wall time."""
        return self.steps / self.seconds if self.seconds > 0 else float("inf")

    def summary(self) -> dict[str, Any]:
        """Return all fields except tensors, ready for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("x", "images", "y")}
        return plain | {"labels": self.y.tolist(), "restarts": len(self.trial_losses), "steps_per_second": self.steps_per_second}
