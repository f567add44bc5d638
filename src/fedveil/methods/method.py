"""The interface of a method, and the parts that make up a method.

A release part plans each release: a `Schedule` from the round alone, a `Policy` from earlier releases, an `Unproven` one from the
private update. A client trains (`fedveil.training.local`). A server computes the step of the global model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, final

from fedveil.accounting.types import Claim, Event, View
from fedveil.mechanism.mechanisms import Participation
from fedveil.mechanism.plan import COUNTS, Plan, Released, Upload
from fedveil.methods.setting import Setting
from fedveil.training.local import Client, State

if TYPE_CHECKING:
    from torch import Tensor


# --- releases ------------------------------------------------------------------------------------------------------------


class Schedule(ABC):
    """Plans that depend on the round alone, and so are the same for all clients with the same noise.

    All plans are made and hashed before the first round, and the plan of a round is checked against its hash. This is required
    to credit a sum with the noise of all its uploads.
    """

    @abstractmethod
    def plan(self, s: Setting, t: int) -> Plan:
        """Return the plan of round t; if clients have individual caps, `s` has the noise of one cap."""


@dataclass(frozen=True)
class Fixed(Schedule):
    """Schedule with the same plan in every round."""

    always: Plan

    def plan(self, s: Setting, t: int) -> Plan:
        return self.always


@dataclass(frozen=True)
class Scheduled(Schedule):
    """Schedule with a list of plans, one for each round."""

    plans: tuple[Plan, ...]

    def plan(self, s: Setting, t: int) -> Plan:
        return self.plans[t]


class Policy(ABC):
    """Plans that depend on earlier releases, through an explicit plain state that is checkpointed.

    In the server view each client has a separate state, in the other views all share one. A policy receives only earlier releases
    and public values, so it cannot read private data. With an attribute `public_steps`, the server trains on the public split
    before each round (`Released.public_update`).
    """

    def start(self, s: Setting) -> State:
        """Return the state before the first release."""
        return {}

    @abstractmethod
    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Return the plan of the next release; a pure function, so that all workers compute the same plan."""

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Return the state after a release."""
        return state

    def observe_all(self, s: Setting, state: State, uploads: Sequence[Upload]) -> State:
        """Return the server's state after all uploads of a round, available to later plans as `seen.server` (server view)."""
        return state


class EvenPolicy(Policy):
    """Policy whose plans all have the same cost; the budget refuses a plan that costs more.

    Noise in shares needs it, since an attempt at a sum may fail and is then repeated.
    """


@dataclass(frozen=True)
class Unproven:
    """Plans made from the private update, as some published methods do; such a run has no guarantee.

    Args:
        reads: names of the private quantities that plans depend on, for the ledger. reason: why nothing can be proven.
        make: computes the plan from the setting, the released values and the private update [d].
    """

    reads: tuple[str, ...]
    reason: str
    make: Callable[[Setting, Released, Tensor], Plan]


Release = Schedule | Policy | Unproven


def as_trained(s: Setting, released: Released, update: Tensor) -> Plan:
    """Release the update unchanged."""
    return Plan()


def what_is_not_zero(s: Setting, released: Released, update: Tensor) -> Plan:
    """Omit coordinates that are zero after training."""
    return Plan(support=update != 0)


# --- servers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summed:
    """Input of a server that sees only a sum: the weighted mean of a round's uploads, and the global model.

    Args:
        vector: mean of the updates [d]. start: the global model [d] that they are relative to. extras: means of the extras.
    """

    round: int
    vector: Tensor
    start: Tensor
    extras: Mapping[str, Tensor]

    @classmethod
    def of(cls, uploads: Sequence[Upload], model: Tensor) -> Summed:
        """Return the mean of these uploads."""
        weights = [u.weight for u in uploads]
        extras = {name: _weighted_mean([u.extras[name] for u in uploads], weights) for name in uploads[0].extras}
        return cls(uploads[0].round, mean(uploads), model, extras)


class SumServer(ABC):
    """Server that receives only the mean of a round's uploads, so that the noise of their sum may be credited."""

    @abstractmethod
    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        """Return the next state, initially empty, and the step [d] of the global model."""


class UploadServer(ABC):
    """Server that sees single uploads, if the run has them; the sum of their noise is not credited."""

    @abstractmethod
    def step(self, s: Setting, state: State, uploads: Sequence[Upload]) -> tuple[State, Tensor]:
        """Return the next state, initially empty, and the step [d]; `start` of each upload is the global model [d]."""


@final
class Mean(SumServer):
    """Server that takes the mean."""

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        return state, total.vector


@final
class CoverageMean(UploadServer):
    """Server that averages each coordinate over the clients that sent it; coordinates that nobody sent do not change."""

    def step(self, s: Setting, state: State, uploads: Sequence[Upload]) -> tuple[State, Tensor]:
        import torch

        total = torch.zeros_like(uploads[0].vector)
        weight = torch.zeros_like(total)
        for u in uploads:
            total.add_(u.vector, alpha=u.weight)
            weight.add_(1.0 if u.support is None else u.support, alpha=u.weight)
        return state, total / weight.where(weight > 0, torch.ones_like(weight))


def mean(uploads: Sequence[Upload]) -> Tensor:
    """Return the weighted mean of released vectors."""
    return _weighted_mean([u.vector for u in uploads], [u.weight for u in uploads])


def _weighted_mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of vectors of one shape."""
    total = sum(weights)
    result = vectors[0] * (weights[0] / total)
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        result.add_(vector, alpha=weight / total)
    return result


Variant = Literal["published", "proven"]
Weighting = Literal["uniform", "examples"]


class Method(Protocol):
    """Method: a frozen configuration and functions of the public setting; `MethodConfig` has defaults except for `release`."""

    @property
    def name(self) -> str:
        """Return the name in configurations, for instance `dp-fedavg`."""
        ...

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        """Return the extra vectors of a release: shape by name, `()` for one number."""
        ...

    def client_epsilons(self, s: Setting) -> Sequence[float]:
        """Return the cap of each client, the largest equal to `privacy.epsilon` (server view); empty if all are equal."""
        ...

    def calibrate(self, s: Setting) -> Setting:
        """Return the setting with its noise multiplier (see `calibrated`)."""
        ...

    def release(self, s: Setting) -> Release:
        """Return the part that plans each release."""
        ...

    def client(self, s: Setting) -> Client:
        """Return the local training."""
        ...

    def server(self, s: Setting) -> SumServer | UploadServer:
        """Return the part that computes the step of the global model from the releases."""
        ...

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return the privacy events of a run seen under `view`."""
        ...

    def claim(self, s: Setting) -> Claim | None:
        """Return the paper's claim about this configuration, or None."""
        ...

    def clip_norm(self, s: Setting) -> float | None:
        """Return C, the bound on an update's L2 norm, or None if updates are not clipped."""
        ...

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return the assumptions of the proven bound beyond those of every run."""
        ...


def extras_of(method: Method, s: Setting) -> dict[str, tuple[int, ...]]:
    """Return the shape of each extra of a release: those of the method, and the counts of an evaluation."""
    return {**method.extras(s), **({} if s.evaluation is None else {COUNTS: s.counts_shape})}


def participation_of(method: Method, s: Setting) -> Participation | None:
    """Return the participation rule that the run's noise depends on, or None; the sampler enforces it."""
    release = method.release(s)
    return release.always.mechanism.participation if isinstance(release, Fixed) else None


def is_user_defined(method: Method) -> bool:
    """Return whether the method is user-defined."""
    return type(method).__module__.partition(".")[0] != "fedveil"


def weighting_of(method: Method) -> Weighting:
    """Return the weighting of clients in the mean: the method's `weighting`, a parameter or property, else uniform."""
    weighting: Weighting = getattr(method, "weighting", "uniform")
    return weighting
