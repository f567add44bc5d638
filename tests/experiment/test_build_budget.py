"""The cap of a run admits exactly what was planned."""

from __future__ import annotations

import pytest

from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Adjacency, Event, Gaussian, SampledGaussian, Scope, Unit, View
from fedveil.errors import BudgetExhausted, ConfigError
from fedveil.experiment.shared_budget import filter_for
from fedveil.ledger.budget import Budget, FixedPlan, GdpFilter, RdpFilter

ZERO = Adjacency.ZERO_OUT
SCOPE = Scope(Unit.CLIENT, ZERO, View.AGGREGATE)


def admitted(planned: list[Event], event: Event, most: int) -> int:
    budget = Budget(filter_for(planned, None, 1e-5, ZERO), SCOPE)
    for n in range(most):
        try:
            budget.spend(event)
        except BudgetExhausted:
            return n
    return most


@pytest.mark.parametrize(
    ("planned", "kind"),
    [
        ([Gaussian(0.3, 20)], GdpFilter),
        ([SampledGaussian(0.1, 1.0, 20)], FixedPlan),
        ([SampledGaussian(0.1, 1.0, 10), SampledGaussian(0.1, 2.0, 10)], RdpFilter),
    ],
)
def test_the_filter_fits_the_plan(planned: list[Event], kind: type) -> None:
    assert isinstance(filter_for(planned, None, 1e-5, ZERO), kind)
    assert isinstance(filter_for([Gaussian(0.3, 20)], 4.0, 1e-5, ZERO), GdpFilter)


def test_as_many_releases_as_planned_and_not_one_more() -> None:
    assert admitted([Gaussian(0.3, 20)], Gaussian(0.3), 99) == 20
    assert admitted([Gaussian(0.3, 20)], Gaussian(0.6), 99) == 5
    assert admitted([SampledGaussian(0.1, 1.0, 20)], SampledGaussian(0.1, 1.0), 99) == 20


def test_less_noise_or_a_higher_rate_than_planned_is_refused() -> None:
    budget = Budget(filter_for([SampledGaussian(0.1, 1.0, 20)], None, 1e-5, ZERO), SCOPE)
    for worse in (SampledGaussian(0.1, 0.99), SampledGaussian(0.11, 1.0), Gaussian(1.0)):
        with pytest.raises(ConfigError, match="not covered"):
            budget.check(worse)


def test_a_mixture_never_exceeds_the_quoted_epsilon() -> None:
    a, b = SampledGaussian(0.1, 1.0), SampledGaussian(0.1, 2.0)
    filter_ = filter_for([SampledGaussian(0.1, 1.0, 10), SampledGaussian(0.1, 2.0, 10)], 3.0, 1e-5, ZERO)
    for order in ([a, b], [b, a], [a, a]):
        budget, spent = Budget(filter_, SCOPE), []
        for n in range(500):
            try:
                budget.spend(order[n % 2])
            except BudgetExhausted:
                break
            spent.append(order[n % 2])
        assert len(spent) > 3
        assert bound(spent, 1e-5, adjacency=ZERO)[0] <= 3.0
