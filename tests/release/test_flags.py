"""A flag speaks of the code of the class that declares it: whoever replaces that code says it again, or it says nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from fedveil.methods.fed_smp import CommonMask
from fedveil.release.flags import speaks_for
from fedveil.release.plan import Fixed, Plan, Released, State, Upload, is_common

PLAN = Plan(clip=1.0, noise_std=1.0)


class ByClient(Fixed):
    """Each client sends a coordinate of its own: no sum has the noise of all."""

    def plan(self, released: Released, state: State) -> Plan:
        return replace(self.always, support=torch.arange(4) == released.client)


class ByClientThough(ByClient):
    """What is above the class that says it counts."""

    common: ClassVar[bool] = True


class Counting(Fixed):
    """Plans follow the state that `observe` makes."""

    def observe(self, state: State, upload: Upload) -> State:
        return {"seen": upload.client}


class ByModel(CommonMask):
    """The mask of `plan` comes from this helper."""

    def _score(self, released: Released) -> torch.Tensor:
        return released.model.abs()


class Measured(Fixed):
    """More beside what the flag speaks of, and another default, change nothing of it."""

    def measures(self, state: State) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Halved(Fixed):
    """A field more, and `plan` as it was."""

    factor: float = 0.5


@dataclass
class Told:
    """The flag is a field, which each instance has."""

    common: bool = True
    plan_of: Any = None

    def start(self) -> State:
        return {}

    def plan(self, released: Released, state: State) -> Plan:
        return PLAN

    def observe(self, state: State, upload: Upload) -> State:
        return state


class ToldByClient(Told):
    plan = ByClient.plan


class SetInInit:
    """The flag is an attribute of each instance alone."""

    def __init__(self) -> None:
        self.common = True

    start, plan, observe = Told.start, Told.plan, Told.observe


class SetByBase(SetInInit):
    plan = ByClient.plan


class Delegating:
    """What an object inside says of its own code is not said of this one's."""

    def __init__(self) -> None:
        self.inner = Fixed(PLAN)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    plan = ByClient.plan


def shadowed() -> Told:
    policy = Told()
    policy.plan = lambda released, state: PLAN  # type: ignore[method-assign]
    return policy


def attributes_alone() -> Any:
    return SimpleNamespace(common=True, start=dict, plan=lambda *_: PLAN, observe=lambda *_: {})


@pytest.mark.parametrize(
    "policy", [Fixed(PLAN), ByClientThough(PLAN), Measured(PLAN), Halved(PLAN), Told(), SetInInit(), attributes_alone()]
)
def test_what_a_class_says_of_the_code_that_runs_counts(policy: Any) -> None:
    assert is_common(policy)


@pytest.mark.parametrize(
    "policy",
    [
        *(ByClient(PLAN), Counting(PLAN), ByModel(None, None), Told(common=False)),  # type: ignore[arg-type]
        *(ToldByClient(), SetByBase(), Delegating(), shadowed()),
    ],
)
def test_what_was_said_of_other_code_does_not(policy: Any) -> None:
    """A sum of such uploads would be credited with noise that is not in it."""
    assert not is_common(policy)


class Ball:
    bounded: ClassVar[bool] = True

    @cached_property
    def radius(self) -> float:
        return 1.0

    @property
    def size(self) -> float:
        return 2 * self.radius

    @classmethod
    def step(cls) -> float:
        return cls().size


class Larger(Ball):
    radius = 5.0


def test_code_is_followed_through_properties_and_class_methods() -> None:
    ball = Ball()
    assert ball.step() == 2
    assert ball.radius == 1  # the cached value is of the instance, and no code of its own
    assert speaks_for(ball, "bounded", "step")
    assert not speaks_for(Larger(), "bounded", "step")
    assert speaks_for(Larger(), "bounded", "another")
    assert not speaks_for(ball, "unheard", "step")
