"""Plans: the clip, the noise and the coordinates of one release.

A plan is made before the data are touched, from a `Released` view: earlier releases and public configuration. A published method
may return a `Raw` plan, which needs the private update; the door then marks the release, and no guarantee is given for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from fedveil.errors import ConfigError
from fedveil.mechanism.mechanisms import Banded, Independent, NoiseMechanism

if TYPE_CHECKING:
    import torch
    from torch import Tensor

State = dict[str, Any]

COUNTS = "evaluation"
"""Name of the extra that holds counts on a client's own test examples."""


@dataclass(frozen=True)
class DpSgd:
    """DP-SGD, record-level privacy inside local training: a per-example clip, and noise on each of `steps` Poisson batches.

    Args:
        clip: L2 bound on each example's gradient.
        noise_multiplier: noise std on the summed gradient / clip.
        rate: probability that an example joins a batch.
        steps: batches in one round.
        expected: divisor of the noisy sum: rate x the public nominal size, the same for every client.
        cap: maximal number of a client's examples that take part, the first ones, which bounds the batch; each example joins a
            batch independently of the others.
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
        """Return the number of examples per pass: a public number, which one batch in ten exceeds."""
        return 8 * max(1, math.ceil((self.expected + math.sqrt(2 * self.expected)) / 8))


@dataclass(frozen=True)
class Extra:
    """Clip and noise of one named extra vector, released with the update.

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
    """Plan of one release. The door clips and adds noise by the same plan for which the ledger is charged.

    A release with DP-SGD inside training has a `LocalDpSgd`, a release without a guarantee an `UnprovenPlan`, and a plan made
    from the private update is a `Raw`.

    Args:
        clip: C, L2 bound on the whole vector after restriction; inf for none.
        noise_std: Gaussian noise std, one number or one per layer [L].
        place: `upload`, noise on each client's vector; `sum`, noise once on the sum of the round.
        layer_clip: C_l, L2 bound per layer [L], or None.
        support: released coordinates, bool [d]; None releases all.
        clamp: bound on the absolute value of each noisy coordinate, or None. It is post-processing of a noisy upload, so it is
            refused for noise in shares, where the server sees only the sum.
        extras: clip and noise of each extra of the release layout. mechanism: draws and prices the noise.
        broadcast: public values that every client receives with the plan (`Local.plan.broadcast`).
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
    """Plan of a release with record-level privacy inside training; the door adds no noise.

    The extra `COUNTS` is noised inside training as well, in as many steps; its clip and noise are those of each step.
    """

    step: DpSgd = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_clip is not None or not math.isinf(self.clip) or self.noise_std != 0.0:
            raise ConfigError(
                "under DP-SGD each example's gradient is clipped and each step noised: leave clip and noise_std out"
            )


@dataclass(frozen=True)
class UnprovenPlan(Plan):
    """Plan of a release without a provable cost, for the given `reason`, although it may be clipped and noised."""

    reason: str = field(kw_only=True)


def in_shares(plan: Plan, honest: int) -> Plan:
    """Return the plan of each client if the noise of a sum is added in shares, such that `honest` of them amount to it.

    Args:
        plan: with noise on the sum.

    Raises:
        ConfigError: its noise cannot be divided.
    """
    if type(plan) is not Plan or plan.place != "sum" or plan.mechanism.stateful or plan.clamp is not None:
        raise ConfigError(
            "privacy.noise_place = 'shares' divides independent noise on the sum, without a clamp, and a plan of this method has "
            "another kind: set it to 'sum'"
        )
    if honest < 1:
        raise ConfigError(f"{honest} honest clients add no noise to a sum: take more clients per round")
    factor = (1 + 2.0**-50) / math.sqrt(honest)  # rounded up, so that the shares never cost more than the sum
    std = plan.noise_std * factor if isinstance(plan.noise_std, float) else plan.noise_std.double() * factor
    extras = {name: Extra(extra.clip, extra.noise_std * factor) for name, extra in plan.extras.items()}
    return replace(plan, noise_std=std, place="upload", extras=extras)


def lets_statistics_out(plan: Plan, reason: str) -> bool:
    """Return whether this release has no guarantee, so that batch statistics may be sent with it."""
    return bool(reason) or (math.isinf(plan.clip) and plan.layer_clip is None and not isinstance(plan, LocalDpSgd))


def _as_floats(plan: object, *names: str) -> None:
    """Convert integers to floats, so that equal plans have one representation."""
    for name in names:
        value = getattr(plan, name)
        if isinstance(value, float | int):
            object.__setattr__(plan, name, float(value))


def _check_kinds(plan: Plan) -> None:
    """Refuse values that the door and the price could interpret differently."""
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
    """Return a deep copy of a plan with tensors on `device`, so that its receiver cannot change it for others."""
    values = {f.name: _copied_value(getattr(plan, f.name), device) for f in fields(plan) if f.name != "mechanism"}
    return type(plan)(mechanism=copy(plan.mechanism), **values)


def _copied_value(value: Any, device: torch.device | str) -> Any:
    if value is None or isinstance(value, float | int | str):
        return value
    if isinstance(value, Mapping):
        return {name: _copied_value(part, device) for name, part in value.items()}
    return value.detach().to(device, copy=True) if hasattr(value, "detach") else deepcopy(value)


@dataclass(frozen=True)
class Raw:
    """Plan of a published policy that needs the private update [d] before it can be made.

    Args:
        reads: names of the private quantities that the plan depends on, for the ledger.
        make: computes the plan from the private update, including the coordinates that it restricts the update to.
        reason: why nothing can be proven.
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
    """Return the DP-SGD step of a plan, or None."""
    return plan.step if isinstance(plan, LocalDpSgd) else None


def reason_of(plan: Plan | Raw) -> str:
    """Return the reason why a plan has no provable cost; an empty string if its price decides."""
    return plan.reason if isinstance(plan, UnprovenPlan | Raw) else ""


@dataclass(frozen=True)
class Upload:
    """One release: a client's noisy vector (server view) or a round's noisy mean (aggregate view, client -1).

    Args:
        vector: [d], zero where nothing was sent. noise_std: std of its noise per layer [L].
        integers: int64 [D], the exact release in units of the grid (`fedveil.mechanism.grid`); None if no noise was added.
        extras: each extra of the release layout, in its shape.
        support: coordinates sent, bool [d], or None for all.
        weight: public weight in the mean. buffers: batch statistics, in published or non-private runs only.
        start: the global model [d] that the update is relative to; passed to a policy when it observes, not stored afterwards.
        public_loss: of that model, as in `Released`; passed likewise.
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
    """Input of a policy: the round and the public global models, and nothing private.

    `client` is the planning client, or -1 for the common plan of a round. `server` is the state from `observe_all`, if the
    policy defines it (server view). Earlier releases of this client (server view) or of earlier rounds (aggregate view) reach
    the policy through `observe`. `public_loss` is the global model's loss on the public split, if the run has one.
    `public_update` [d] is the global model's change by training on that split, if the policy has `public_steps`.
    """

    round: int
    model: Tensor
    previous: Tensor | None
    public_loss: float | None = None
    client: int = -1
    server: State = field(default_factory=dict)
    public_update: Tensor | None = None


def digest(plan: Plan) -> bytes:
    """Return the SHA-256 of all fields of a plan."""
    return hashlib.sha256(
        repr([type(plan).__name__, *((f.name, _plain(getattr(plan, f.name))) for f in fields(plan))]).encode()
    ).digest()


def _plain(value: Any) -> Any:
    """Convert a value so that two values have the same representation only if they are equal."""
    if isinstance(value, Mapping):
        return sorted((str(name), _plain(part)) for name, part in value.items())
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return (str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).digest()) if hasattr(value, "tobytes") else value
