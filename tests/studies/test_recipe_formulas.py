"""Formulas of the convergent f-DP analysis as recipes: Tables 1 to 3 against the equations written out here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedveil.accounting.gaussian import epsilon_of
from fedveil.errors import ConfigError
from fedveil.papers.convergent_dp.claim import FedAvgClaim, StepRates, printed_sensitivity, printed_sensitivity_fedprox
from fedveil.papers.convergent_dp.measurements import of_sensitivity_terms, of_worst_privacy
from fedveil.studies.reproduce.recipe import rows
from fedveil.studies.reproduce.recipe_files import RowJob, job_of, load_recipe
from fedveil.studies.reproduce.reproduction import ReproductionSpec, reproduce

M, K, V, MU, L, SIGMA = 20, 5, 10.0, 0.01, 10.0, 0.01
"""What the recipes' notes say."""
NOWHERE = Path("nowhere")


def row(table: int, label: str) -> RowJob:
    recipe = load_recipe(f"noisy-fedavg/table-{table}")
    return job_of(recipe, next(row for row in rows(recipe) if row.labels == (label,)), "paper")


@pytest.mark.parametrize("t", [100, 10000])
def test_table_1_has_the_printed_equations(t: int) -> None:
    """Equations 15 and 17 and, with alpha = 20, 19; linear losses have sqrt(T) times the mu of a round at constant rates."""

    def measured(label: str) -> dict[str, float]:
        found = of_worst_privacy(row(1, label).config, None, NOWHERE, rounds=[t])
        return {name: series[0][1] for name, series in found.items()}

    unit = 2 * V / (math.sqrt(M) * SIGMA)
    rho = (1 + MU * L) ** K
    constant, stage, prox = (measured(f"Noisy-{n}") for n in ("FedAvg, constant", "FedAvg, stage-wise", "FedProx, alpha = 20"))
    tail = 1 - 2 / (math.exp(t * math.log(rho)) + 1) if t * math.log(rho) < 700 else 1.0
    assert constant["claimed_mu"] == pytest.approx(unit * MU * K * math.sqrt((rho + 1) / (rho - 1) * tail))
    assert constant["linear_mu"] == pytest.approx(unit * MU * K * math.sqrt(t))
    assert constant["composed_mu"] == pytest.approx(constant["linear_mu"])
    assert stage["claimed_mu"] == pytest.approx(unit * MU * K * math.sqrt(2 - 1 / t))
    assert stage["composed_mu"] == pytest.approx(unit * MU * K * math.sqrt(sum(1 / (s + 1) ** 2 for s in range(t))))
    assert stage["linear_mu"] == pytest.approx(unit * MU * K * sum(1 / (s + 1) for s in range(t)) / math.sqrt(t))
    assert prox["claimed_mu"] == pytest.approx(unit / 20 * math.sqrt((40 - L) / L), rel=1e-6)
    assert prox["linear_mu"] == pytest.approx(unit / 20 * (1 - (1 - MU * 20) ** K) * math.sqrt(t))
    assert constant["claimed_mu"] < constant["linear_mu"], "which refutes the claim"


def test_table_3_is_the_noise_at_which_mu_has_that_epsilon() -> None:
    job = row(3, "this paper, constant rates")
    found = of_worst_privacy(job.config, None, NOWHERE, **job.options)
    for name in ("claimed", "linear", "composed"):
        for (t, mu), (same, sigma) in zip(found[f"{name}_mu"], found[f"{name}_sigma"], strict=True):
            assert t == same
            assert epsilon_of(mu * SIGMA / sigma, 1e-5) == pytest.approx(1.0, rel=1e-6)


def test_table_2_as_printed_and_exact() -> None:
    """Round 10, t = 9: the table's entries, and the product and the sum of the rates."""
    expected = {
        "Noisy-FedAvg, mu": (1.1**5, 1.1**5, MU * K, MU * K),
        "Noisy-FedAvg, mu / (k + 1)": (6**0.1, math.prod(1 + 0.1 / j for j in range(1, 6)), math.log(6), MU * 137 / 60),
        "Noisy-FedAvg, mu / (t + 1)": (1.01**5, 1.01**5, MU * K / 10, MU * K / 10),
        "Noisy-FedAvg, mu / (tK + k + 1)": (
            1.1**0.1,
            math.prod(1 + 0.1 / (45 + j) for j in range(1, 6)),
            math.log(1.1),
            MU * sum(1 / (45 + j) for j in range(1, 6)),
        ),
    }
    for label, values in expected.items():
        found = of_sensitivity_terms(row(2, label).config, None, NOWHERE)
        ours = [found[name][9][1] for name in ("rho_printed", "rho", "gamma_printed", "gamma")]
        assert ours == pytest.approx([values[0], values[1], 2 * V / M * values[2], 2 * V / M * values[3]]), label
    found = of_sensitivity_terms(row(2, "Noisy-FedProx, alpha = 20").config, None, NOWHERE)
    distance = 1.0
    for _ in range(K):
        distance = (1 - MU * 20 + MU * L) * distance + MU * 20
    assert found["rho_printed"][9][1] == 2.0
    assert found["rho"][9][1] == pytest.approx(distance)
    assert found["gamma_printed"][9][1] == pytest.approx(2 * V / (M * 20))
    assert found["gamma"][9][1] == pytest.approx(2 * V / (M * 20) * (1 - 0.8**K))


def test_they_run_without_training_or_data(tmp_path: Path) -> None:
    for table in (1, 2, 3):
        done = reproduce(ReproductionSpec(f"noisy-fedavg/table-{table}"), tmp_path, jobs=1)
        run = [outcome for outcome in done.outcomes if not outcome.row.missing]
        assert run
        assert all(not outcome.problem and all(len(values) == 1 for values in outcome.values) for outcome in run)


def test_refused() -> None:
    with pytest.raises(ConfigError, match="alpha > L"):
        printed_sensitivity_fedprox(V, L, L, M)
    setting: dict[str, Any] = {"learning_rate": MU, "clip": V, "steps": K, "smoothness": L, "rounds": 10, "clients": M}
    with pytest.raises(ConfigError, match="round"):
        printed_sensitivity(FedAvgClaim(StepRates.CONSTANT, noise_std=SIGMA, **setting), -1)
    recipe = load_recipe("aldp-fl/table-4")
    with pytest.raises(ConfigError, match="not of fedavg"):
        of_worst_privacy(job_of(recipe, rows(recipe)[0], "paper").config, None, NOWHERE)


def of_table_1(label: str, **options: Any) -> dict[str, list[float]]:
    found = of_worst_privacy(row(1, label).config, None, NOWHERE, **options)
    return {name: [value for _, value in series] for name, series in found.items()}


def test_the_minimum_is_what_cauchy_schwarz_leaves_of_equation_13() -> None:
    """H_0 by its last equation, round by round; at constant rates it is the square of Theorem 3 (a)."""
    label = "Noisy-FedAvg, stage-wise"
    found = of_table_1(label, rounds=[40])
    rhos = [(1 + MU * L / (t + 1)) ** K for t in range(40)]
    weights = [math.prod(rhos[t + 1 :]) for t in range(40)]
    gammas = [2 * MU * V * K / (M * (t + 1)) for t in range(40)]
    least = sum(w * g for w, g in zip(weights, gammas, strict=True)) ** 2 / sum(w * w for w in weights)
    assert found["minimum_mu"] == pytest.approx([math.sqrt(M * least) / SIGMA])
    assert found["linear_mu"][0] < found["minimum_mu"][0] < found["claimed_mu"][0]
    constant = of_table_1("Noisy-FedAvg, constant", rounds=[40])
    assert constant["minimum_mu"] == pytest.approx(constant["claimed_mu"])


def test_claims_over_k_grow_as_linear_losses_do_but_for_iterative_rates_and_the_proximal_term() -> None:
    for label, grows in {"constant": 100, "stage-wise": 100, "iteratively": 1}.items():
        few, many = of_table_1(f"Noisy-FedAvg, {label}", steps=[50, 5000])["claimed_mu_by_steps"]
        assert many / few == pytest.approx(grows, rel=0.02)
    prox = of_table_1("Noisy-FedProx, alpha = 20", steps=[50, 5000])
    assert prox["claimed_mu_by_steps"][0] == prox["claimed_mu_by_steps"][1]
    assert prox["linear_mu_by_steps"][0] == pytest.approx(prox["linear_mu_by_steps"][1], rel=1e-4)


def test_orders_of_table_3_and_its_renyi_column() -> None:
    """Lemma 4: mu of Gaussian DP is epsilon = mu^2 of Renyi DP at order 2; orders of sqrt(T), T and none."""
    recipe = load_recipe("noisy-fedavg/growth")
    found = {}
    for one in rows(recipe):
        job = job_of(recipe, one, "paper")
        found[one.labels[0]] = of_worst_privacy(job.config, None, NOWHERE, **job.options)["growth"][0][1]
    assert found["Cheng et al. (2022)"] == found["Hu et al. (2023)"] == found["Fukami et al. (2024)"] == pytest.approx(10)
    assert found["Shi et al. (2021)"] == found["Zhang & Tang (2022)"] == pytest.approx(100)
    assert found["Bastianello et al. (2024)"] == pytest.approx(1)
    assert found["this paper, stage-wise rates"] == pytest.approx(math.sqrt((2 - 1e-4) / (2 - 1e-2)))
    stage = of_table_1("Noisy-FedAvg, stage-wise", rounds=[100])
    assert stage["claimed_rdp"] == pytest.approx([stage["claimed_mu"][0] ** 2])
    with pytest.raises(ConfigError, match=r"measure\.analysis"):
        of_table_1("Noisy-FedAvg, stage-wise", analysis="weii")
