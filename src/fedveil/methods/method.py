"""What the rest of fedveil asks of a method, and the parts of which a method is made.

A release plans what leaves: a `Schedule` from the round alone, a `Policy` from what was released, an `Unproven` one from the
private update. A client trains (`fedveil.training.local`). A server makes the step of the global model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, final

from fedveil.accounting.types import Claim, Event, View
from fedveil.mechanism.mechanisms import Participation
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.setting import Setting
from fedveil.release.release_layout import COUNTS
from fedveil.training.local import Client, State

if TYPE_CHECKING:
    from torch import Tensor


# --- releases ------------------------------------------------------------------------------------------------------------


class Schedule(ABC):
    """Plans that follow from the round alone, and so are those of all clients of one noise.

    All of them are made and hashed before the first round, and the plan of a round is held against its hash. Only so may a sum
    be credited with the noise of all its uploads.
    """

    @abstractmethod
    def plan(self, s: Setting, t: int) -> Plan:
        """Return the plan of round t; where clients have caps of their own, `s` has the noise of one cap."""


@dataclass(frozen=True)
class Fixed(Schedule):
    """The same plan in every round."""

    always: Plan

    def plan(self, s: Setting, t: int) -> Plan:
        return self.always


@dataclass(frozen=True)
class Scheduled(Schedule):
    """A list of plans, one for each round."""

    plans: tuple[Plan, ...]

    def plan(self, s: Setting, t: int) -> Plan:
        return self.plans[t]


class Policy(ABC):
    """Plans that follow what was released: functions of explicit state, which is plain and checkpoints.

    In the server view each client has a state of its own, in the others there is one for all. All that a policy is given has left
    already or is public, so it cannot read private data. One with an attribute `public_steps` asks the server to train on the
    public split before each round (`Released.public_update`).
    """

    def start(self, s: Setting) -> State:
        """Return the state before the first release."""
        return {}

    @abstractmethod
    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        """Return the plan of the coming release: a pure function, so that any worker comes to the same one."""

    def observe(self, s: Setting, state: State, left: Upload) -> State:
        """Return the state after a release."""
        return state

    def observe_all(self, s: Setting, state: State, uploads: Sequence[Upload]) -> State:
        """Return the server's state after all uploads of a round, which later plans find in `seen.server` (server view)."""
        return state


@dataclass(frozen=True)
class Unproven:
    """Plans that are made from the private update, as published methods make them; nothing is proven of such a run.

    Args:
        reads: names of the private quantities that decide, for the ledger. reason: why nothing can be proven.
        make: from the setting, what was released and the private update [d] to the plan.
    """

    reads: tuple[str, ...]
    reason: str
    make: Callable[[Setting, Released, Tensor], Plan]


Release = Schedule | Policy | Unproven


def as_trained(s: Setting, seen: Released, update: Tensor) -> Plan:
    """Everything leaves as training made it."""
    return Plan()


def what_is_not_zero(s: Setting, seen: Released, update: Tensor) -> Plan:
    """Leave out coordinates that training left at zero."""
    return Plan(support=update != 0)


# --- servers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summed:
    """The input of a server that sees only a sum: the weighted mean of a round's uploads, and the global model.

    Args:
        vector: [d], of the updates. start: the global model [d] that they are relative to. extras: the means of the extras.
    """

    round: int
    vector: Tensor
    start: Tensor
    extras: Mapping[str, Tensor]

    @classmethod
    def of(cls, uploads: Sequence[Upload], model: Tensor) -> Summed:
        """Return the mean of these uploads."""
        weights = [u.weight for u in uploads]
        extras = {name: weighted_mean([u.extras[name] for u in uploads], weights) for name in uploads[0].extras}
        return cls(uploads[0].round, mean(uploads), model, extras)


class SumServer(ABC):
    """A server that is given the mean of a round's uploads and nothing else of them, so that their sum may be credited."""

    @abstractmethod
    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        """Return its next state, empty at first, and the step [d] of the global model."""


class UploadServer(ABC):
    """A server that sees single uploads, where the run has them; no sum of their noise is credited."""

    @abstractmethod
    def step(self, s: Setting, state: State, uploads: Sequence[Upload]) -> tuple[State, Tensor]:
        """Return its next state, empty at first, and the step [d]; `start` of each upload is the global model [d]."""


@final
class Mean(SumServer):
    """The mean."""

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        return state, total.vector


@final
class CoverageMean(UploadServer):
    """For each coordinate, the weighted mean over the clients that sent it; the others keep the global model's value."""

    def step(self, s: Setting, state: State, uploads: Sequence[Upload]) -> tuple[State, Tensor]:
        import torch

        total = torch.zeros_like(uploads[0].vector)
        weight = torch.zeros_like(total)
        for u in uploads:
            total.add_(u.vector, alpha=u.weight)
            weight.add_(1.0 if u.support is None else u.support, alpha=u.weight)
        return state, total / weight.where(weight > 0, torch.ones_like(weight))


def mean(uploads: Sequence[Upload]) -> Tensor:
    """The weighted mean of what was released."""
    return weighted_mean([u.vector for u in uploads], [u.weight for u in uploads])


def weighted_mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of vectors of one shape."""
    total = sum(weights)
    found = vectors[0] * (weights[0] / total)
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        found.add_(vector, alpha=weight / total)
    return found


Variant = Literal["published", "proven"]
Weighting = Literal["uniform", "examples"]


class Method(Protocol):
    """A method: a frozen configuration and functions of the public setting. `MethodConfig` has defaults for all but `release`."""

    @property
    def name(self) -> str:
        """The name in configurations, for instance `dp-fedavg`."""
        ...

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        """Named vectors that leave beside the update: shape by name, `()` for one number."""
        ...

    def client_epsilons(self, s: Setting) -> Sequence[float]:
        """The cap of each client, from client 0 on, the largest of them `privacy.epsilon` (server view); empty: all alike."""
        ...

    def calibrate(self, s: Setting) -> Setting:
        """The setting with its noise multiplier known (see `calibrated`)."""
        ...

    def release(self, s: Setting) -> Release:
        """The part that plans each release."""
        ...

    def client(self, s: Setting) -> Client:
        """What local training does."""
        ...

    def server(self, s: Setting) -> SumServer | UploadServer:
        """The part that makes the step of the global model from what was released."""
        ...

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Everything that a run releases to an adversary with that view, as the accountant must count it."""
        ...

    def claim(self, s: Setting) -> Claim | None:
        """What the paper claims of this configuration; None when it claims nothing."""
        ...

    def clip_norm(self, s: Setting) -> float | None:
        """C, the bound on one update's L2 norm, or None when updates are not clipped."""
        ...

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """What the proven bound rests on beyond what every run rests on."""
        ...


def extras_of(method: Method, s: Setting) -> dict[str, tuple[int, ...]]:
    """The shape of each extra of a release: those of the method, and the counts of an evaluation."""
    return {**method.extras(s), **({} if s.evaluation is None else {COUNTS: (2,)})}


def participation_of(method: Method, s: Setting) -> Participation | None:
    """Who may take part how often, where the noise of the run depends on it; the sampler enforces it."""
    release = method.release(s)
    return release.always.mechanism.participation if isinstance(release, Fixed) else None


def is_own(method: Method) -> bool:
    """Whether its class is the user's own code."""
    return type(method).__module__.partition(".")[0] != "fedveil"


def weighting_of(method: Method) -> Weighting:
    """How clients weigh in the mean: by the method's `weighting`, as a parameter or a property, else all the same."""
    found: Weighting = getattr(method, "weighting", "uniform")
    return found
