"""Noise of a larger federation: an extrapolation by name, and the epsilon of the federation that there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.special import gammaln
from scipy.stats import binom, norm

from fedveil.accounting.types import at_most
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.experiment.config_files import load_config
from fedveil.experiment.presets import path_of
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.run import run
from fedveil.experiment.verification import verification
from fedveil.ledger.ledger import Ledger

PEER = "privacy={delta=1e-6, noise_cohort={clients=1000000, clients_per_round=1000, epsilon=2.0}}"
"""That of pfl-research's CIFAR-10 benchmark: 1,000 users get the noise of a million."""
RUN = ("training.rounds=1500", "training.clients_per_round=50")
LARGER = {"clients": 180, "clients_per_round": 45, "epsilon": 2.0}


def peer(privacy: str = PEER) -> Config:
    return load_config(path_of("utility/cifar-10"), [*RUN, privacy])


def small(larger: dict[str, Any] | None = None, **privacy: Any) -> Config:
    """60 clients, 15 a round."""
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 60}},
        model={"name": "linear", "start": "zero"},
        method={"name": privacy.pop("method", "dp-fedavg")},
        training={"rounds": 3, "clients_per_round": 15, "sampling": "poisson", **privacy.pop("training", {})},
        privacy={"delta": 1e-3, **({} if larger is None else {"noise_cohort": larger}), **privacy},
        run={"engine": "inline"},
    )


def least_epsilon(q: float, z: float, rounds: int, delta: float) -> float:
    """A lower bound by hand: an adversary counts the rounds in which most of what one client adds shows."""
    k, found = np.arange(1, rounds + 1), []
    for cut in np.linspace(0.5, 0.99, 50) / z:
        seen, never = q * norm.sf(cut - 1 / z) + (1 - q) * norm.sf(cut), norm.logsf(cut)
        caught = binom.sf(k - 1, rounds, seen) - delta
        ways = gammaln(rounds + 1) - gammaln(k + 1) - gammaln(rounds - k + 1)  # comb(rounds, k) times as likely by chance
        found.append(float(np.max(np.log(caught[caught > 0]) - k[caught > 0] * never - ways[caught > 0])))
    return max(found)


def most_epsilon(q: float, z: float, rounds: int, delta: float) -> float:
    """An upper bound by hand: as if the adversary were told in which rounds the client took part."""
    times = np.arange(1, rounds + 1)
    chance, mu = binom.pmf(times, rounds, q), np.sqrt(times) / z

    def excess(epsilon: float) -> float:
        each = norm.sf(epsilon / mu - mu / 2) - np.exp(epsilon + norm.logsf(epsilon / mu + mu / 2))
        return float(chance @ each) - delta

    return float(brentq(excess, 1.0, 1e7))


def test_the_noise_is_that_of_the_larger_federation_scaled_to_the_sum() -> None:
    z = calibrated_setting(peer())[1].z
    larger = pld.from_gaussian_mechanism(20 * z, sampling_prob=0.001, value_discretization_interval=1e-3).self_compose(1500)
    assert larger.get_epsilon_for_delta(1e-6) == pytest.approx(2.0, rel=5e-3)
    assert z == pytest.approx(0.0309, abs=1e-4)


def test_the_statement_has_the_epsilon_of_the_federation_that_there_is() -> None:
    statement = certify_config(peer())
    z = statement.noise_multiplier
    assert z is not None
    plain = certify_config(peer(f"privacy={{delta=1e-6, noise_multiplier={z!r}}}"))
    assert statement.views == plain.views
    assert statement.target_epsilon is None
    bounds = least_epsilon(0.05, z, 1500, 1e-6), most_epsilon(0.05, z, 1500, 1e-6)
    assert bounds == pytest.approx((5.4e4, 6.2e4), rel=0.01)
    assert bounds[1] < statement.proven.epsilon < 1.05 * bounds[1]
    assert statement.warnings[0] == (
        "extrapolation: the noise is that of a federation of 1,000,000 clients, 1,000 per round, in which epsilon would be 2; "
        f"for these 1,000 clients, 50 per round, epsilon = {at_most(statement.proven.epsilon)} is what is proven"
    )


def test_a_federation_of_the_same_size_is_no_extrapolation() -> None:
    same = certify_config(small({"clients": 60, "clients_per_round": 15, "epsilon": 2.0}))
    plain = certify_config(small(epsilon=2.0))
    assert same.noise_multiplier == plain.noise_multiplier
    assert same.proven == plain.proven


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedsam", "time-adaptive"])
def test_a_run_is_charged_what_it_costs_and_verifies(method: str, tmp_path: Path) -> None:
    result = run(small(LARGER, method=method), tmp_path / "run")
    assert [f for f in verification(tmp_path / "run").findings if f.kind in ("contradicted", "unknown")] == []
    assert result.privacy.warnings[0].startswith("extrapolation: ")
    assert result.privacy.proven.epsilon > 10
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        rows = [entry for _, _, entry in ledger.entries()]
    last = rows[-1]
    assert last.noise_std[0] / last.clip[0] == pytest.approx(result.privacy.noise_multiplier)
    assert float(result.history[-1]["epsilon_spent"]) == pytest.approx(result.privacy.proven.epsilon, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small(LARGER, epsilon=2.0), "leave privacy.epsilon"),
        (small(LARGER, noise_multiplier=1.0), "leave privacy.epsilon"),
        (small(LARGER, selection={"runs": 3}), "privacy.selection"),
        (small({**LARGER, "clients": 50}), "give at least as many as this federation has"),
        (small({**LARGER, "clients_per_round": 10}), "give at least as many as this federation has"),
        (small(LARGER, view="server"), "privacy.view = 'aggregate'"),
        (small(LARGER, method="adaptive-clipping"), "method.name = .dp-fedavg., .dp-fedsam. or .time-adaptive."),
        (small(LARGER, method="fedavg"), "method.name = .dp-fedavg., .dp-fedsam. or .time-adaptive."),
        (small(LARGER, unit="record", training={"local": "dp-sgd"}), "privacy.unit = 'client'"),
    ],
)
def test_what_no_scale_of_the_noise_says_is_refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        certify_config(config)
