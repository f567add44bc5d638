"""The price of a private search with methods whose rounds differ or whose local training does, by a second way and end to end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from scipy.optimize import brentq

from fedveil.accounting.selection import Selection, tries_of_mean
from fedveil.accounting.types import SampledGaussian
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.verification import verification
from fedveil.methods.run_cost import run_releases
from fedveil.studies.tune.search import Chance, SearchSpec, private_search

ROUNDS, Q, DELTA, NOISE, LAW = 8, 0.25, 1e-3, 20.0, tries_of_mean(0, 5)


def config(method: dict[str, Any], *, chosen: bool = True, **more: Any) -> Config:
    """60 clients, 15 a round by Poisson sampling, eight rounds, epsilon 4; as what the best of five expected runs has."""
    selection = {"selection": {"runs": 5, "shape": 0, "score_noise": NOISE}} if chosen else {}
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 60}, "client_test_fraction": 0.25},
        model={"name": "linear", "start": "zero"},
        method=method,
        training={"rounds": ROUNDS, "clients_per_round": 15, "sampling": "poisson", **more.pop("training", {})},
        privacy={"epsilon": 4.0, "delta": DELTA, **selection, **more},
        run={"engine": "inline"},
    )


def noise_of(found: Config) -> float:
    """The calibrated noise multiplier."""
    return calibrated_setting(found)[1].z


def by_renyi(rounds: list[tuple[float, int]]) -> float:
    """By Renyi divergences at integer orders: Mironov, Talwar and Zhang's sum for each kind of round, then the theorem."""

    def divergence(order: int) -> float:
        total = order / (2 * NOISE**2)  # of the score
        for z, count in rounds:
            weights = [math.comb(order, k) * (1 - Q) ** (order - k) * Q**k for k in range(order + 1)]
            terms = [weight * math.exp(k * (k - 1) / (2 * z * z)) for k, weight in enumerate(weights)]
            total += count * math.log(math.fsum(terms)) / (order - 1)
        return total

    extra = min((1 - 1 / b) * divergence(b) - math.log(LAW.gamma) / b for b in range(2, 30))

    def converted(order: int) -> float:
        best = divergence(order) + extra + math.log(LAW.mean) / (order - 1)
        return best + math.log1p(-1 / order) - (math.log(DELTA) + math.log(order)) / (order - 1)

    return min(converted(order) for order in range(2, 30))


def by_library(rounds: list[tuple[float, int]]) -> float:
    """By the privacy profile of one run (Koskela, Redberg and Wang 2024) as dp-accounting gives it."""
    gaussian = dp_accounting.GaussianDpEvent
    kinds = [dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(Q, gaussian(z)), n) for z, n in rounds]
    one = PLDAccountant().compose(dp_accounting.ComposedDpEvent([*kinds, gaussian(NOISE)]))
    aside = brentq(lambda e: one.get_delta(e) - LAW.gamma / (1 - LAW.gamma) * math.expm1(e), 0, 9)
    return float(one.get_epsilon(DELTA / LAW.mean) + (1 + LAW.eta) * aside)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ({"name": "dp-fedavg"}, [(1.0, 8)]),
        ({"name": "dp-fedsam", "rho": 0.1}, [(1.0, 8)]),
        ({"name": "time-adaptive"}, [(1.0, 6), (2.0, 2)]),
        ({"name": "time-adaptive", "save_until": [0.5], "saving": 0.25}, [(1.0, 4), (4.0, 4)]),
    ],
)
def test_the_best_of_a_secret_number_of_runs_costs_what_two_other_ways_say(
    method: dict[str, Any], shape: list[tuple[float, int]]
) -> None:
    found = config(method)
    z, proven = noise_of(found), certify_config(found).proven.epsilon
    rounds = [(factor * z, count) for factor, count in shape]
    assert 3.9996 < proven <= 4.0
    assert 1.05 * proven < by_renyi(rounds) < 1.5 * proven
    assert proven == pytest.approx(by_library(rounds), rel=2e-3)
    assert 1.08 * noise_of(config(method, chosen=False)) < z


def test_saving_rounds_are_charged_as_they_are_planned() -> None:
    method, s = calibrated_setting(config({"name": "time-adaptive"}))
    dear, cheap, _ = run_releases(method, s, s.scope.view)
    assert isinstance(dear, SampledGaussian)
    assert isinstance(cheap, SampledGaussian)
    assert (dear.count, cheap.count) == (6, 2)
    assert (dear.noise_multiplier, cheap.noise_multiplier) == pytest.approx((s.z, 2 * s.z))


@pytest.mark.parametrize(
    ("method", "grid"),
    [("dp-fedsam", {"method.rho": [0.0, 0.1]}), ("time-adaptive", {"method.clip": [0.2, 0.5]})],
)
def test_a_search_with_it_ends_with_a_run_that_verifies(method: str, grid: dict[str, list[Any]], tmp_path: Path) -> None:
    spec = SearchSpec(config({"name": method}, chosen=False, training={"rounds": 4, "sampling": "fixed"}), grid, NOISE)
    path, statement = private_search(spec, tmp_path / "out", Selection(5.0, 0.0), Chance(lambda n: 0, lambda n: n - 1))
    assert [f for f in verification(path).findings if f.kind in ("contradicted", "unknown")] == []
    assert 3.9996 < statement.proven.epsilon <= 4.0


@pytest.mark.parametrize(
    ("method", "grid", "message"),
    [
        ({"name": "time-adaptive"}, {"method.saving": [0.25, 0.5]}, "plan other releases"),
        ({"name": "time-varying-dp"}, {"method.clip": [0.2, 0.5]}, "noise is fixed before the run"),
        ({"name": "fedanc"}, {"method.clip": [0.2, 0.5]}, "noise is fixed before the run"),
        ({"name": "time-adaptive", "epsilons": [1.0, 4.0]}, {"method.clip": [0.2, 0.5]}, "privacy.view = 'server'"),
    ],
)
def test_what_has_another_price_in_each_run_or_client_is_refused(
    method: dict[str, Any], grid: dict[str, list[Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        private_search(SearchSpec(config(method, chosen=False), grid, NOISE), tmp_path / "out", Selection(5.0, 0.0))
    assert not (tmp_path / "out").exists()
