"""What the rest of the house asks of a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from fedveil.accounting.types import Claim, Event, View
from fedveil.mechanism.noise_mechanism import Participation
from fedveil.methods.parts import Fixed, Release, SumServer, UploadServer
from fedveil.methods.setting import Setting
from fedveil.release.evaluation_counts import COUNTS
from fedveil.training.local import Client

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
