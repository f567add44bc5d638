"""`fedveil.testing.check_method`: built-in methods pass, and methods with a planted fault do not."""

from __future__ import annotations

from typing import Any, Literal

import pytest

import fedveil as fv
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.base import MethodConfig, Policy, Setting, gaussian_plan
from fedveil.methods.method_registry import METHODS
from fedveil.testing import check_method
from fedveil.training.local import State

pytestmark = pytest.mark.heavy
SMALL: dict[str, Any] = {"training": {"rounds": 2}}


class Drawing(MethodConfig):
    """A method whose clip follows a counter outside of its state: an interrupted run is planned in another way."""

    name: Literal["drawing"] = "drawing"
    clip: float = 0.5

    def release(self, s: Setting) -> Policy:
        return Counter()


class Counter(Policy):
    """A policy that counts its own calls."""

    calls = 0

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        type(self).calls += 1
        return gaussian_plan(s, 0.5 / type(self).calls)


def test_a_built_in_method_passes() -> None:
    check_method(fv.DPFedAvg, **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adaptive-clipping", "fedglp-adp", "fed-smp", "aldp-fl", "time-adaptive"])
def test_more_methods_pass(name: str) -> None:
    check_method(METHODS[name])


@pytest.mark.slow
def test_a_policy_that_remembers_outside_of_its_state_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "drawing", Drawing)
    with pytest.raises(AssertionError, match="drawing fails"):
        check_method(Drawing, **SMALL)


def test_what_no_view_accepts_is_said() -> None:
    with pytest.raises(AssertionError, match="accepts no view"):
        check_method(fv.FedAvg)
