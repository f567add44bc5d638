from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedveil.accounting.accountant import bound
from fedveil.accounting.subsampled import one_step_delta
from fedveil.accounting.types import Adjacency, SampledGaussian, Scope, Unit, View
from fedveil.attacks.audit_run import audit_config
from fedveil.audit.adapter import Case, linear_model
from fedveil.audit.canaries import epsilon_bound, guess
from fedveil.audit.dp_sgd_audit import (
    DpSgdClient,
    audit_canaries,
    audit_two_worlds,
    canary_scores,
    crafted,
    run_score,
    simulated_scores,
)
from fedveil.audit.two_world import Rates, audit_sampled, choose_cut, curve_of, draw, largest_noise, rates
from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, parse
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.run_directory import write_config
from fedveil.gradients.gradient_blocks import rows
from fedveil.gradients.per_example import per_example_gradients
from fedveil.tasks.classification import Classification
from method_kit import layout

DELTA = 5e-4


def config(batch: int = 1000, steps: int = 1, rounds: int = 3, name: str = "dp-fedavg", **privacy: Any) -> Config:
    """8 clients of about 180 records: batches of 1000 are full (rate 1), of 64 have rate 0.36."""
    training = {"rounds": rounds, "clients_per_round": 4, "batch_size": batch, "local_steps": steps, "local": "dp-sgd"}
    noise = {} if "noise_multiplier" in privacy else {"epsilon": 2.0}
    return parse(
        {
            "data": {"partition": {"kind": "iid", "clients": 8}},
            "model": {"name": "linear"},
            "method": {"name": name},
            "training": training | {"optimizer": {"name": "sgd", "lr": 0.1}},
            "privacy": {"delta": DELTA, "unit": "record", "view": "server", **noise, **privacy},
        }
    )


def client(configuration: Config, *, noise: float = 1.0, dimension: int = 40) -> DpSgdClient:
    method, setting = calibrated_setting(configuration)
    faulty = replace(setting, noise_multiplier=setting.z * noise)
    return DpSgdClient(Case.of(method, faulty, dimension=dimension), setting.rounds)


def test_crafted_gradients_are_those_of_the_linear_model() -> None:
    model = linear_model(layout({"a": (3, 2), "b": (4,)}))
    x = 10 * torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    model.load(torch.randn(10, generator=torch.Generator().manual_seed(1)))
    y = torch.zeros(5, dtype=torch.int64)
    assert torch.equal(rows(crafted(model.module, x, y)[0]), -x)
    assert torch.allclose(rows(per_example_gradients(model.module, x, y, Classification().losses)[0]), -x)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_without_noise_a_tall_example_moves_each_round_by_its_steps_in_clips(steps: int, view: str) -> None:
    one = client(config(steps=steps, view=view, noise_multiplier=0.0))
    d = one.case.setting.layout.dimension
    own = torch.zeros(d)
    own[0] = 10.0
    moved = [one.along(vector)[0] for vector in one.uploads(torch.stack([own, 0 * own]), np.random.default_rng(0), crafted)]
    assert moved == pytest.approx([steps] * 3, rel=1e-4)


def test_log_likelihood_ratio_of_hidden_participation_by_hand() -> None:
    one = client(config(batch=64, steps=1, rounds=2))
    q, z = one.step.rate, one.step.noise_multiplier

    def density(x: float, shift: float) -> float:
        return (1 - q) * math.exp(-(x**2) / (2 * z**2)) + q * math.exp(-((x - shift) ** 2) / (2 * z**2))

    x = np.array([0.4, 1.7])
    expected = sum(math.log(density(v, 1.0) / density(v, 0.0)) for v in x)
    assert one.ratio(x) == pytest.approx(expected)
    opposite = client(config(batch=64, steps=1, rounds=2, adjacency="replace_one"))
    z, q = opposite.step.noise_multiplier, opposite.step.rate
    assert opposite.ratio(x) == pytest.approx(sum(math.log(density(v, 1.0) / density(v, -1.0)) for v in x))


@pytest.mark.few(2)
@pytest.mark.parametrize("usual", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["one view", "the other"])
@pytest.mark.parametrize(
    ("batch", "steps", "name", "adjacency", "views"),
    [
        (1000, 1, "dp-fedavg", "zero_out", ("server", "aggregate")),
        (64, 1, "dp-fedavg", "replace_one", ("aggregate", "server")),
        (64, 2, "fedglp-adp", "zero_out", ("server", "aggregate")),
        (64, 2, "fedavg", "zero_out", ("aggregate", "server")),
    ],
)
def test_no_proven_number_is_exceeded(
    batch: int, steps: int, name: str, adjacency: str, views: tuple[str, str], usual: bool
) -> None:
    configuration = config(batch, steps, name=name, adjacency=adjacency, view=views[not usual])
    statement = audit_config(configuration, n=40)
    audits = statement.own.audits
    assert len(audits) == 2
    assert all(audit.epsilon <= statement.proven.epsilon for audit in audits)
    assert not statement.contradictions()


def test_an_audit_tells_its_steps_and_how_many_runs_are_begun() -> None:
    told: list[tuple[int, int, str]] = []
    audit_config(config(64, 2, rounds=2), n=12, on_step=lambda done, total, what: told.append((done, total, what)))
    runs = [
        done for done, total, what in told if what == "step 1 of 2, 2 rounds of DP-SGD, one example" and total == 2 * (12 + 20)
    ]
    assert runs == list(range(64))
    assert told[-1][2].startswith("step 2 of 2")


def test_a_log_of_an_audit_has_a_line_for_each_step(tmp_path: Path) -> None:
    write_config(tmp_path / "small.toml", config(64, 2, rounds=2).model_dump(mode="json"))
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "small.toml"), "--n", "12"])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("auditing: ")]
    assert [line[:22] for line in lines][:: len(lines) - 1] == ["auditing: step 1 of 2,", "auditing: step 2 of 2,"]


def test_half_the_noise_is_refuted_at_rate_one() -> None:
    found = [
        audit_two_worlds(client(config(rounds=1), noise=f), np.random.default_rng(0), n=250, delta=DELTA) for f in (0.5, 1.0)
    ]
    assert found[0].epsilon > 2.0 >= found[1].epsilon > 0.5


@pytest.mark.slow
def test_half_the_noise_is_refuted_where_examples_are_sampled() -> None:
    configuration = config(batch=64, rounds=5)
    honest, faulty = (
        audit_two_worlds(client(configuration, noise=f), np.random.default_rng(0), n=300, delta=DELTA) for f in (1.0, 0.5)
    )
    assert "sampled Gaussian curve" in honest.test
    assert faulty.epsilon > 2.0 >= honest.epsilon > 0.0  # honest: 0.08 to 0.35 with five seeds


def test_rounds_that_differ_are_not_taken_for_equal_ones() -> None:
    """time-adaptive saves in its first round: rate 1/2, then 1. The curve of four equal rounds showed 28.9 where 23.1 is true."""
    configuration = config(name="time-adaptive", rounds=4, noise_multiplier=0.5)
    one = client(configuration)
    assert [one.step.rate, one.alike()] == [0.5, False]
    assert client(config(name="time-adaptive", rounds=1, noise_multiplier=0.5)).alike()
    found = audit_two_worlds(one, np.random.default_rng(0), n=200, delta=DELTA)
    assert "Clopper-Pearson" in found.test
    assert 1 < found.epsilon <= certify_config(configuration).proven.epsilon


def test_half_the_noise_is_refuted_by_one_run_with_canaries() -> None:
    honest, faulty = (
        audit_canaries(client(config(), noise=f, dimension=1000), np.random.default_rng(0), delta=DELTA) for f in (1.0, 0.5)
    )
    assert honest.n == 650
    assert faulty.epsilon > 2.0 >= honest.epsilon > 0.4


def test_canaries_of_a_real_run_score_as_the_simulation_says() -> None:
    one, rng = client(config(batch=64, steps=2), dimension=1000), np.random.default_rng(0)
    real, coins = (np.concatenate(parts) for parts in zip(*[canary_scores(one, rng) for _ in range(20)], strict=True))
    simulated, tossed = simulated_scores(one, 13_000, rng)
    tossed = np.array(tossed)
    for inside in (True, False):
        assert real[coins == inside].mean() == pytest.approx(simulated[tossed == inside].mean(), abs=0.12)
        assert real[coins == inside].std() == pytest.approx(simulated[tossed == inside].std(), rel=0.04)


def test_curve_at_rate_one_is_the_gaussian_one() -> None:
    curve = curve_of(SampledGaussian(1.0, 2.0, 3), DELTA, Adjacency.ZERO_OUT)
    mu = math.sqrt(3) / 2
    for fpr in (0.01, 0.1, 0.4):
        exact = 1 - _phi(_quantile(fpr) + mu)
        assert curve(fpr) == pytest.approx(exact, abs=2e-3)
        assert curve(fpr) <= exact + 1e-9


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


def test_noise_is_bounded_by_exact_rates() -> None:
    event = SampledGaussian(1.0, 1.0, 1)
    wrong = round(10_000 * _phi(-0.5))
    found = largest_noise(Rates(wrong, 10_000, wrong, 10_000), event, DELTA, Adjacency.ZERO_OUT)
    assert 1.0 < found < 1.1
    assert math.isinf(largest_noise(Rates(60, 100, 60, 100), event, DELTA, Adjacency.ZERO_OUT))


def test_expected_counts_never_show_more_than_the_truth() -> None:
    """Below delta = 1e-10 the accountant has Renyi bounds only, 5 % above the truth here: no way to a lower bound."""
    event, n, cut, scope = SampledGaussian(0.5, 1.0), 100_000, 1.5, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
    above = 1 - _phi(cut)
    counts = Rates(round(n * above), n, round(n * (1 - 0.5 * above - 0.5 * (1 - _phi(cut - 1)))), n)
    found = audit_sampled(counts, event, 1e-11, scope).epsilon
    assert max(one_step_delta(0.5, 1.0, found)) >= 1e-11  # the true epsilon is no smaller
    assert found > 5


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_sampled_curve_is_sound(adjacency: Adjacency) -> None:
    """400 repeats of the exact mechanism: its own curve is refuted in at most 5 % of them."""
    rng, q, z, count = np.random.default_rng(0), 0.3, 1.2, 3
    opposite = adjacency is Adjacency.REPLACE_ONE
    event = SampledGaussian(q, z / adjacency.factor, count)
    curve = curve_of(event, DELTA, adjacency)

    def scores(world: int, n: int) -> np.ndarray:
        joined = rng.random((n, count)) < q
        sign = 1.0 if world else (-1.0 if opposite else 0.0)
        x = sign * joined + z * rng.standard_normal((n, count))

        def density(shift: float) -> np.ndarray:
            return np.log((1 - q) * np.exp(-(x**2) / (2 * z**2)) + q * np.exp(-((x - shift) ** 2) / (2 * z**2)))

        return (density(1.0) - density(-1.0 if opposite else 0.0)).sum(axis=1)

    cut = choose_cut([scores(0, 300), scores(1, 300)], event, 500, DELTA, adjacency, 0.05)
    wrong = sum(rates(scores(0, 500), scores(1, 500), cut).refutes(curve) for _ in range(400))
    assert wrong <= 20


def test_one_run_of_sampled_canaries_is_sound() -> None:
    one = client(config(batch=64, steps=2))
    true, _ = bound([one.event], DELTA, adjacency=Adjacency.ZERO_OUT)
    rng = np.random.default_rng(0)
    found = [epsilon_bound(guess(*simulated_scores(one, 650, rng), 75, 75), DELTA) for _ in range(400)]
    assert sum(epsilon > true for epsilon in found) <= 20


def test_scores_of_the_worlds_are_apart_by_what_was_charged() -> None:
    """At rate 1 the log-likelihood ratio has mean +-mu^2 / 2 and variance mu^2."""
    one = client(config(rounds=2))
    mu = math.sqrt(2) / one.step.noise_multiplier
    run, rng = run_score(one), np.random.default_rng(3)
    low, high = draw(run, 0, 300, rng), draw(run, 1, 300, rng)
    assert high.mean() - low.mean() == pytest.approx(mu**2, rel=0.25)
    assert low.std() == pytest.approx(mu, rel=0.15)


def test_clients_are_not_what_dp_sgd_protects() -> None:
    with pytest.raises(ConfigError, match=r"privacy.unit = 'record'"):
        audit_config(config(unit="client", noise_multiplier=1.0), n=40)
    method, setting = calibrated_setting(parse({"method": {"name": "dp-fedavg"}, "privacy": {"epsilon": 2.0}}))
    with pytest.raises(ConfigError, match="dp-sgd"):
        _ = DpSgdClient(Case.of(method, setting), 1).step
