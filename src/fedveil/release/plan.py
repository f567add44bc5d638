"""Plans, and the policies that make them.

A policy chooses, for the coming round, the clip, the noise and the coordinates to send. In a proven variant it does so before
the data are touched, and all it is ever given is a `Released` view: what has already left, and public configuration. It cannot
read private data because it never gets any. A published variant may answer with `Raw`, which asks for the private update; the
door then marks the release, and nothing can be proven from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedveil.errors import ConfigError

if TYPE_CHECKING:
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
    """

    clip: float
    noise_multiplier: float
    rate: float
    steps: int


@dataclass(frozen=True)
class Plan:
    """What one release will be. The same object is executed by the door and charged to the ledger.

    Args:
        clip: C, L2 bound on the whole vector after restriction; inf for none.
        noise_std: Gaussian noise std, one number or one per layer [L].
        place: `upload`, noise on each client's vector; `sum`, noise once on the sum of the round.
        layer_clip: C_l, L2 bound per layer [L], or None.
        support: coordinates that leave, bool [d]; None sends all.
        clamp: bound on the absolute value of each noisy coordinate (post-processing), or None.
        dp_sgd: record-level privacy inside training; the door then adds no noise of its own.
        unproven: why nothing can be proven from this release although it is clipped and noised; empty otherwise.
    """

    clip: float = math.inf
    noise_std: float | Tensor = 0.0
    place: Literal["upload", "sum"] = "upload"
    layer_clip: Tensor | None = None
    support: Tensor | None = None
    clamp: float | None = None
    dp_sgd: DpSgd | None = None
    unproven: str = ""

    def __post_init__(self) -> None:
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


def same_plan(a: Plan, b: Plan) -> bool:
    """Whether two plans say the same, tensors compared by value."""
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(Plan)]
    return all(x.equal(y) if hasattr(x, "equal") and hasattr(y, "equal") else bool(x == y) for x, y in pairs)


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


@dataclass(frozen=True)
class Upload:
    """What left: one client's noisy vector (server view) or one round's noisy mean (aggregate view, client -1).

    Args:
        vector: [d], zero where nothing was sent. noise_std: std of its noise per layer [L].
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


@dataclass(frozen=True)
class Released:
    """All that a policy may see: the round, the global models that everyone has, and nothing private.

    What this client (server view) or this round (aggregate view) released before reaches the policy through `observe`.
    `public_loss` is the global model's loss on the public split, where the run has one.
    """

    round: int
    model: Tensor
    previous: Tensor | None
    public_loss: float | None = None


class Policy(Protocol):
    """Chooses each release from what was released. Functions of explicit state; the state is plain and checkpoints."""

    def start(self) -> State:
        """The state before the first release."""
        ...

    def plan(self, released: Released, state: State) -> Plan | Raw:
        """The plan of the coming release: a pure function, so that any worker comes to the same one."""
        ...

    def observe(self, state: State, upload: Upload) -> State:
        """The state after `upload` has left."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The policy that always makes the same plan."""

    always: Plan

    def start(self) -> State:
        """No state."""
        return {}

    def plan(self, released: Released, state: State) -> Plan:
        """The same plan."""
        return self.always

    def observe(self, state: State, upload: Upload) -> State:
        """Nothing to learn."""
        return state
