"""Heterogeneous noise and the composition theorems against optimisers, grids and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from fedveil.accounting import gaussian as c
from fedveil.accounting.gaussian import delta_of, epsilon_of, mu_groups, mu_groups_joint
from fedveil.errors import ConfigError

sizes = st.integers(1, 6)


def hundredths(low: int, high: int) -> st.SearchStrategy[float]:
    """Numbers whose squares are far above what a linear programme's solver rounds away."""
    return st.integers(low, high).map(lambda n: n / 100)


@given(st.lists(st.tuples(hundredths(0, 300), hundredths(5, 300)), min_size=1, max_size=6), hundredths(0, 500))
def test_knapsack_equals_the_linear_programme(groups: list[tuple[float, float]], joint: float) -> None:
    """maximise sum y_l / sigma_l^2 over 0 <= y_l <= Delta_l^2, sum y_l <= joint^2."""
    deltas, sigmas = (np.array(x) for x in zip(*groups, strict=True))
    best = linprog(-1 / sigmas**2, A_ub=[np.ones_like(sigmas)], b_ub=[joint**2], bounds=[(0, d * d) for d in deltas])
    assert mu_groups_joint(deltas, sigmas, joint) ** 2 == pytest.approx(-best.fun, rel=1e-7, abs=1e-9)
    assert mu_groups_joint(deltas, sigmas, 0) == 0
    assert mu_groups_joint(deltas, sigmas, joint) <= mu_groups(deltas, sigmas) * (1 + 1e-12)
    assert mu_groups_joint(deltas, sigmas, 1e6) == pytest.approx(mu_groups(deltas, sigmas), rel=1e-12)


def test_a_group_without_noise_costs_everything_unless_it_cannot_move() -> None:
    assert mu_groups([1, 0.1], [1, 0]) == math.inf
    assert mu_groups([1, 0.0], [1, 0]) == 1
    assert mu_groups_joint([1, 0.1], [1, 0], 1) == math.inf
    with pytest.raises(ConfigError, match="one noise std per group"):
        mu_groups([1], [1, 2])
    with pytest.raises(ConfigError):
        mu_groups([math.nan], [1])


def test_known_compositions() -> None:
    assert c.naive([0.1, 0.2], [1e-6, 0.7]) == (pytest.approx(0.3), pytest.approx(0.700001))
    assert c.gdp([3, 4]) == 5
    assert c.zcdp([0.1, 0.2]) == pytest.approx(0.3)
    assert list(c.rdp([[1.0, 2.0], [0.5, 0.5]])) == [1.5, 2.5]
    with pytest.raises(ConfigError):
        c.rdp([[1.0], [1.0, 2.0]])


@given(st.floats(0.01, 5), st.integers(1, 400), st.floats(1e-8, 1e-2))
def test_every_general_bound_lies_above_the_exact_gaussian_one(mu: float, count: int, delta: float) -> None:
    total = c.gdp([mu] * count)
    exact = epsilon_of(total, delta)
    rho = total**2 / 2
    orders = 1 + np.geomspace(1e-3, 1e3, 4000)
    tight = c.rdp_epsilon(orders, orders * rho, delta)
    assert exact <= tight * (1 + 1e-9)
    assert tight <= c.zcdp_epsilon(rho, delta) * (1 + 1e-3)
    assert math.exp(c.rdp_log_delta(orders, orders * rho, exact)) >= delta_of(total, exact) * (1 - 1e-9)


@given(st.lists(st.floats(0, 3), min_size=1, max_size=8), st.floats(0, 3))
def test_gdp_and_zcdp_add_up_in_any_order_and_grow_with_each_release(mus: list[float], more: float) -> None:
    assert c.gdp(mus) == pytest.approx(c.gdp(mus[::-1]))
    assert c.gdp([*mus, more]) >= c.gdp(mus)
    assert c.gdp([*mus, more]) ** 2 == pytest.approx(c.gdp(mus) ** 2 + more**2)
    assert c.zcdp([m**2 / 2 for m in mus]) == pytest.approx(c.gdp(mus) ** 2 / 2)
