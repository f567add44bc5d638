"""Plans that the door and the price could read in two ways: each had a finite epsilon that did not hold, and is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedveil.accounting.types import Adjacency, Event, Gaussian, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.release.cost import event_of
from fedveil.release.noise_mechanism import Independent
from fedveil.release.plan import DpSgd, Extra, Plan
from fedveil.training.params import Layout

LAYOUT = Layout.of({"a": (3,), "b": (2,)})
SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
GOOD: dict[str, Any] = {"clip": 1.0, "noise_std": 2.0, "place": "sum"}


class Lying(float):
    """A number that is small in a price."""

    def __rmul__(self, other: Any) -> Any:
        return 1e-3

    def __truediv__(self, other: Any) -> Any:
        return 1e-3


class Cheap(Independent):
    """A mechanism with a price of its own."""

    def price(self, mu: float, rate: float | None, round: int) -> Event:
        return Gaussian(mu / 100)


class Numbers(torch.Tensor):
    """A tensor of a class of its own."""


class TwoFaced(Plan):
    """A plan of a class of its own."""


class Wide(Extra):
    """An extra of a class of its own."""


class Rare(DpSgd):
    """DP-SGD of a class of its own."""


@pytest.mark.parametrize("place", ["Sum", "uploads", "", None])
def test_noise_that_is_added_nowhere(place: Any) -> None:
    """A misspelt place was charged as noise in shares and drawn neither on the uploads nor on their sum."""
    with pytest.raises(ConfigError, match="must be 'upload' or 'sum'"):
        Plan(**GOOD | {"place": place})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_support_that_is_not_bool_scales_the_noise(dtype: torch.dtype) -> None:
    """A support of 1e-6 made a millionth of the noise that was charged."""
    with pytest.raises(ConfigError, match="support must be a plain bool tensor"):
        Plan(**GOOD, support=torch.ones(5, dtype=dtype))


@pytest.mark.parametrize("name", ["noise_std", "layer_clip", "support"])
def test_tensors_of_a_class_of_their_own(name: str) -> None:
    value = torch.ones(5 if name == "support" else 2, dtype=torch.bool if name == "support" else torch.float32)
    Plan(**GOOD | {name: value})
    with pytest.raises(ConfigError, match=f"{name} must be a plain"):
        Plan(**GOOD | {name: value.as_subclass(Numbers)})


def test_a_mechanism_with_a_price_of_its_own() -> None:
    with pytest.raises(ConfigError, match="the door knows no mechanism Cheap"):
        Plan(**GOOD, mechanism=Cheap())


def test_independent_noise_is_on_the_grid_of_the_data() -> None:
    """A data grid 2^20 times as fine as that of the noise made the data 2^20 times as large as was charged."""
    with pytest.raises(TypeError, match="shift"):
        Independent(shift=-20)  # type: ignore[call-arg]
    assert Independent().shift == 0


def test_numbers_of_a_class_of_their_own_become_plain() -> None:
    plan = Plan(clip=Lying(1.0), noise_std=Lying(2.0), place="sum", extras={"w": Extra(Lying(1.0), Lying(2.0))}, clamp=Lying(9.0))
    held = (plan.clip, plan.noise_std, plan.clamp, plan.extras["w"].clip, plan.extras["w"].noise_std)
    assert [type(number) for number in held] == [float] * 5
    event = event_of(plan, LAYOUT, SCOPE, rate=None)
    assert isinstance(event, Gaussian)
    assert event.mu == pytest.approx(0.5**0.5)  # 1 / 2 for each of the two parts
    step = DpSgd(Lying(1.0), Lying(2.0), Lying(0.1), 5, Lying(10.0), 60)
    assert {type(number) for number in (step.clip, step.noise_multiplier, step.rate, step.expected)} == {float}


def test_parts_of_a_class_of_their_own() -> None:
    with pytest.raises(ConfigError, match="must be a Plan, not a class derived"):
        event_of(TwoFaced(**GOOD), LAYOUT, SCOPE, rate=None)
    with pytest.raises(ConfigError, match="not a class derived from them"):
        Plan(**GOOD, extras={"w": Wide(1.0, 2.0)})
    with pytest.raises(ConfigError, match="not a class derived from them"):
        Plan(dp_sgd=Rare(1.0, 1.0, 0.1, 5, 10.0, 60))
