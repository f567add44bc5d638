"""Plans: the clip, the noise and the coordinates of one release, and what they may be made of.

A plan is made before the data are touched, of a `Released` view: what has already left, and public configuration. A published
method may have a `Raw` one, which asks for the private update; the door then marks the release, and nothing is proven of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from fedveil.errors import ConfigError
from fedveil.mechanism.mechanisms import Banded, Independent, NoiseMechanism

if TYPE_CHECKING:
    import torch
    from torch import Tensor

State = dict[str, Any]


@dataclass(frozen=True)
class DpSgd:
    """Record-level privacy inside local training: per-example clip, noise at each of `steps` Poisson batches.

    Args:
        clip: L2 bound on each example's gradient.
        noise_multiplier: noise std on the summed gradient / clip.
        rate: probability with which each example joins a batch.
        steps: batches in one round.
        expected: examples that the noisy sum is divided by: rate x the public nominal size, the same for every client.
        cap: examples of a client that take part, the first ones, so that a batch holds no more; who is in a batch depends on
            nobody else's coin.
    """

    clip: float
    noise_multiplier: float
    rate: float
    steps: int
    expected: float
    cap: int

    def __post_init__(self) -> None:
        _as_floats(self, "clip", "noise_multiplier", "rate", "expected")
        if not self.clip >= 1e-10:
            raise ConfigError(f"the clip of each example's gradient must be at least 1e-10, got {self.clip}")

    @property
    def together(self) -> int:
        """Examples that are computed in one pass: a public number, which one batch in ten exceeds."""
        return 8 * max(1, math.ceil((self.expected + math.sqrt(2 * self.expected)) / 8))


@dataclass(frozen=True)
class Extra:
    """One named vector that leaves beside the update: its L2 clip and the std of its noise.

    Args:
        clip: L2 bound on the extra. noise_std: Gaussian noise std on each of its coordinates.
    """

    clip: float
    noise_std: float

    def __post_init__(self) -> None:
        _as_floats(self, "clip", "noise_std")
        if not (self.clip > 0 and math.isfinite(self.clip)):
            raise ConfigError(f"the clip of an extra must be finite and > 0, got {self.clip}")
        if not (self.noise_std >= 0 and math.isfinite(self.noise_std)):
            raise ConfigError(f"the noise_std of an extra must be finite and >= 0, got {self.noise_std}")


@dataclass(frozen=True)
class Plan:
    """The plan of one release: clipped and noised at the door, which executes what the ledger is charged for.

    A release with DP-SGD inside training is a `LocalDpSgd`, one of which nothing is proven an `UnprovenPlan`, or a `Raw` one
    where it is made from the private update.

    Args:
        clip: C, L2 bound on the whole vector after restriction; inf for none.
        noise_std: Gaussian noise std, one number or one per layer [L].
        place: `upload`, noise on each client's vector; `sum`, noise once on the sum of the round.
        layer_clip: C_l, L2 bound per layer [L], or None.
        support: coordinates that leave, bool [d]; None sends all.
        clamp: bound on the absolute value of each noisy coordinate, or None; post-processing of what it is applied to, so it is
            refused for noise in shares, where the server sees only the sum.
        extras: clip and noise of each extra of the release layout. mechanism: how the noise comes about, and what it costs.
        broadcast: public values that every client gets with the plan (`Local.plan.broadcast`).
    """

    clip: float = math.inf
    noise_std: float | Tensor = 0.0
    place: Literal["upload", "sum"] = "upload"
    layer_clip: Tensor | None = None
    support: Tensor | None = None
    clamp: float | None = None
    extras: Mapping[str, Extra] = field(default_factory=dict)
    mechanism: NoiseMechanism = field(default_factory=Independent)
    broadcast: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _as_floats(self, "clip", "noise_std", "clamp")
        _check_kinds(self)
        if not self.clip > 0:
            raise ConfigError(f"clip must be > 0, got {self.clip}")
        if isinstance(self.noise_std, int | float):
            if not (self.noise_std >= 0 and math.isfinite(self.noise_std)):
                raise ConfigError(f"noise_std must be finite and >= 0, got {self.noise_std}")
        elif not bool(((self.noise_std >= 0) & self.noise_std.isfinite()).all()):
            raise ConfigError(f"noise_std must be finite and >= 0 in each layer, got {self.noise_std.tolist()}")
        if self.layer_clip is not None and not bool((self.layer_clip > 0).all()):
            raise ConfigError(f"layer_clip must be > 0 in each layer, got {self.layer_clip.tolist()}")
        if self.clamp is not None and not self.clamp > 0:
            raise ConfigError(f"clamp must be > 0, got {self.clamp}")


@dataclass(frozen=True)
class LocalDpSgd(Plan):
    """A release with record-level privacy inside training, to which the door adds no noise of its own."""

    step: DpSgd = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_clip is not None or not math.isinf(self.clip) or self.noise_std != 0.0:
            raise ConfigError(
                "under DP-SGD each example's gradient is clipped and each step noised: leave clip and noise_std out"
            )


@dataclass(frozen=True)
class UnprovenPlan(Plan):
    """A release of which nothing can be proven although it may be clipped and noised; `reason` says why."""

    reason: str = field(kw_only=True)


def lets_statistics_out(plan: Plan, reason: str) -> bool:
    """Whether this release promises nothing, so that batch statistics may travel with it."""
    return bool(reason) or (math.isinf(plan.clip) and plan.layer_clip is None and not isinstance(plan, LocalDpSgd))


def _as_floats(plan: object, *names: str) -> None:
    """Make floats of whole numbers, so that equal plans have one representation."""
    for name in names:
        value = getattr(plan, name)
        if isinstance(value, float | int):
            object.__setattr__(plan, name, float(value))


def _check_kinds(plan: Plan) -> None:
    """Refuse what the door and the price could read in two ways."""
    if plan.place not in ("upload", "sum"):
        raise ConfigError(f"the place of noise must be 'upload' or 'sum', got {plan.place!r}")
    if type(plan.mechanism) not in (Independent, Banded):
        raise ConfigError(
            f"the door knows no mechanism {type(plan.mechanism).__name__}, so what it says of its price proves nothing: "
            f"use Independent or Banded"
        )
    for name in ("noise_std", "layer_clip", "support"):
        value, kind = getattr(plan, name), "bool" if name == "support" else "floating-point"
        if hasattr(value, "dtype") and not (str(value.dtype) == "torch.bool" if kind == "bool" else value.is_floating_point()):
            raise ConfigError(f"{name} must be a {kind} tensor, got {value.dtype}")


def copied(plan: Plan, device: torch.device | str = "cpu") -> Plan:
    """The same plan with values of its own, tensors on `device`, so that whoever gets it cannot change it for others."""
    own = {f.name: _own(getattr(plan, f.name), device) for f in fields(plan) if f.name != "mechanism"}
    return type(plan)(mechanism=copy(plan.mechanism), **own)


def _own(value: Any, device: torch.device | str) -> Any:
    if value is None or isinstance(value, float | int | str):
        return value
    if isinstance(value, Mapping):
        return {name: _own(part, device) for name, part in value.items()}
    return value.detach().to(device, copy=True) if hasattr(value, "detach") else deepcopy(value)


@dataclass(frozen=True)
class Raw:
    """A published policy's answer: a plan that needs the private update [d] before it can be made.

    Args:
        reads: names of the private quantities that decide, for the ledger.
        make: from the private update to the plan; it may also change the update's meaning by what it restricts.
        reason: why nothing can be proven from it.
    """

    reads: tuple[str, ...]
    make: Callable[[Tensor], Plan]
    reason: str

    def __post_init__(self) -> None:
        if not self.reads or not self.reason:
            raise ConfigError(
                "a plan that is made from the private update must name what it reads and say why nothing can be proven from it: "
                f"got reads = {self.reads!r}, reason = {self.reason!r}; a plan that reads nothing private is a Plan"
            )


def step_of(plan: Plan | Raw) -> DpSgd | None:
    """DP-SGD inside training, where a release is made of that."""
    return plan.step if isinstance(plan, LocalDpSgd) else None


def reason_of(plan: Plan | Raw) -> str:
    """Why nothing can be proven of a release; empty where its price says."""
    return plan.reason if isinstance(plan, UnprovenPlan | Raw) else ""


@dataclass(frozen=True)
class Upload:
    """What left: one client's noisy vector (server view) or one round's noisy mean (aggregate view, client -1).

    Args:
        vector: [d], zero where nothing was sent. noise_std: std of its noise per layer [L].
        integers: int64 [D], what left to the bit, in units of the grid (`fedveil.mechanism.grid`); None where no noise was added.
        extras: each extra of the release layout, in its shape.
        support: coordinates sent, bool [d], or None for all.
        weight: public weight in the mean. buffers: batch statistics, in published or non-private runs only.
        start: the global model [d] that the update is relative to; given to a policy when it observes, not kept afterwards.
        public_loss: of that model, as in `Released`; given likewise.
    """

    client: int
    round: int
    vector: Tensor
    noise_std: Tensor
    plan: Plan
    support: Tensor | None = None
    weight: float = 1.0
    buffers: Tensor | None = None
    start: Tensor | None = None
    public_loss: float | None = None
    integers: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Released:
    """All that a policy may see: the round, the global models that everyone has, and nothing private.

    `client` is the one that plans, or -1 for the common plan of a round. `server` is what `observe_all` made of all uploads,
    where a policy has it (server view). What this client (server view) or this round (aggregate view) released before reaches
    the policy through `observe`. `public_loss` is the global model's loss on the public split, where the run has one.
    `public_update` [d] is how training on that split moves the global model, where the policy has `public_steps`.
    """

    round: int
    model: Tensor
    previous: Tensor | None
    public_loss: float | None = None
    client: int = -1
    server: State = field(default_factory=dict)
    public_update: Tensor | None = None


def digest(plan: Plan) -> bytes:
    """The SHA-256 of all that a plan says."""
    return hashlib.sha256(
        repr([type(plan).__name__, *((f.name, _plain(getattr(plan, f.name))) for f in fields(plan))]).encode()
    ).digest()


def _plain(value: Any) -> Any:
    """Values that have the same representation only where they are equal."""
    if isinstance(value, Mapping):
        return sorted((str(name), _plain(part)) for name, part in value.items())
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return (str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).digest()) if hasattr(value, "tobytes") else value
