"""Plans that the door and the price could read in two ways: each had a finite epsilon that did not hold, and is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedveil.accounting.types import Adjacency, Event, Gaussian, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.mechanisms import Independent
from fedveil.mechanism.plan import DpSgd, Extra, LocalDpSgd, Plan, UnprovenPlan, digest
from fedveil.training.params import Layout

LAYOUT = Layout.of({"a": (3,), "b": (2,)})
SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
GOOD: dict[str, Any] = {"clip": 1.0, "noise_std": 2.0, "place": "sum"}


class Cheap(Independent):
    """A mechanism with a price of its own."""

    def price(self, mu: float, rate: float | None, round: int) -> Event:
        return Gaussian(mu / 100)


@pytest.mark.parametrize("place", ["Sum", "uploads", "", None])
def test_noise_that_is_added_nowhere(place: Any) -> None:
    """A misspelt place was charged as noise in shares and drawn neither on the uploads nor on their sum."""
    with pytest.raises(ConfigError, match="must be 'upload' or 'sum'"):
        Plan(**GOOD | {"place": place})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_support_that_is_not_bool_scales_the_noise(dtype: torch.dtype) -> None:
    """A support of 1e-6 made a millionth of the noise that was charged."""
    with pytest.raises(ConfigError, match="support must be a bool tensor"):
        Plan(**GOOD, support=torch.ones(5, dtype=dtype))


def test_a_mechanism_with_a_price_of_its_own() -> None:
    with pytest.raises(ConfigError, match="the door knows no mechanism Cheap"):
        Plan(**GOOD, mechanism=Cheap())


def test_independent_noise_is_on_the_grid_of_the_data() -> None:
    """A data grid 2^20 times as fine as that of the noise made the data 2^20 times as large as was charged."""
    with pytest.raises(TypeError, match="shift"):
        Independent(shift=-20)  # type: ignore[call-arg]
    assert Independent().shift == 0


def test_dp_sgd_has_no_clip_and_no_noise_at_the_door() -> None:
    with pytest.raises(ConfigError, match="leave clip and noise_std out"):
        LocalDpSgd(**GOOD, step=DpSgd(1.0, 1.0, 0.1, 5, 10.0, 60))


def test_a_hash_tells_plans_apart() -> None:
    """Of all that a plan says: numbers, tensors by kind and value, public values, the mechanism and the kind of plan."""
    plain = Plan(**GOOD)
    same, others = (
        Plan(clip=1, noise_std=2, place="sum"),
        [
            replace(plain, noise_std=2.0000000000000004),
            replace(plain, place="upload"),
            replace(plain, support=torch.ones(5, dtype=torch.bool)),
            replace(plain, layer_clip=torch.ones(2)),
            replace(plain, layer_clip=torch.ones(2).double()),
            replace(plain, broadcast={"v": torch.ones(2)}),
            replace(plain, extras={"w": Extra(1.0, 2.0)}),
            replace(plain, mechanism=Independent(bits=12)),
            UnprovenPlan(**GOOD, reason="why"),
        ],
    )
    assert digest(same) == digest(plain)
    assert len({digest(plan) for plan in (plain, *others)}) == len(others) + 1
