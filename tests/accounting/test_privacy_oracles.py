"""Every reference value of oracles.json, to 1e-9 relative; an expression without a call here is a failure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedveil.accounting import gaussian, last_iterate, subsampled
from fedveil.accounting.types import Adjacency, View
from fedveil.papers.aldp_fl import claim
from fedveil.papers.convergent_dp import claim as noisy_fedavg
from fedveil.papers.convergent_dp.claim import StepRates
from fedveil.papers.fedanc import method as fedanc
from fedveil.papers.fedglp_adp import claim as fedglp
from fedveil.papers.ladp_fl import claim as ladp
from reference_costs import softmax_kl

ORACLES = {row["expr"]: float(row["value"]) for row in json.loads((Path(__file__).parent / "oracles.json").read_text())}
ZERO = Adjacency.ZERO_OUT
EXPANDING = {"hidden_iterates": True, "clipping_inactive": True}


def _gammas(
    schedule: StepRates, mu: float, clip: float, steps: int, rounds: int, clients: int, alpha: float = 0.0
) -> list[float]:
    rates = noisy_fedavg.learning_rates(schedule, mu, steps, rounds)
    return [last_iterate.shift(row, clip, clients, proximal=alpha) for row in rates]


def _exact_linear() -> float:
    return noisy_fedavg.linear_loss_mu(_gammas(StepRates.CONSTANT, 0.1, 10, 5, 600, 50), 50, 1)


def _stage_wise() -> float:
    gammas = _gammas(StepRates.STAGE_WISE, 0.5, 1, 1, 100, 1)  # first shift 2 V mu / m = 1
    return noisy_fedavg.composition_mu(gammas, 1, 1, View.AGGREGATE)


def _softmax_kl() -> float:
    i = np.arange(512)
    w = 0.2 * ((7 * i % 512) - 256) / 512
    return softmax_kl(w + 0.1 * w[(5 * i + 3) % 512], w)


def _const(rho: float, gamma: float, rounds: int, diameter: float) -> float:
    return last_iterate.final_mu_constant(rho, gamma, rounds, diameter, 1, **EXPANDING)


def _general() -> float:
    rho, gamma = [1.1, 0.9, 1.3, 1, 1.2, 0.8], [0.5, 0.4, 0.3, 0.6, 0.2, 0.1]
    return last_iterate.final_mu(rho, gamma, [9, 1, 1.5, 0.7, 2, 0.9], [1, 1.2, 0.8, 1, 1.5, 0.9], **EXPANDING) ** 2


def _sigma_at_two() -> float:
    return fedglp.claimed_noise_multiplier(2, 20, 0.1)


CALLS: dict[str, Callable[[], float]] = {
    "gdp_delta(mu=1, eps=1)": lambda: gaussian.delta_of(1, 1),
    "gdp_delta(mu=0.5, eps=1)": lambda: gaussian.delta_of(0.5, 1),
    "gdp_delta(mu=3, eps=10)": lambda: gaussian.delta_of(3, 10),
    "gdp_delta(mu=0.1, eps=0.5)": lambda: gaussian.delta_of(0.1, 0.5),
    "gdp_eps(mu=1, delta=1e-05)": lambda: gaussian.epsilon_of(1, 1e-5),
    "gdp_eps(mu=0.5, delta=1e-05)": lambda: gaussian.epsilon_of(0.5, 1e-5),
    "gdp_eps(mu=10, delta=1e-05)": lambda: gaussian.epsilon_of(10, 1e-5),
    "gdp_eps(mu=0.1, delta=1e-05)": lambda: gaussian.epsilon_of(0.1, 1e-5),
    "gdp_mu(eps=1, delta=1e-05)": lambda: gaussian.mu_of(1, 1e-5),
    "gdp_mu(eps=4, delta=1e-07)": lambda: gaussian.mu_of(4, 1e-7),
    "gdp_mu(eps=8, delta=1e-05)": lambda: gaussian.mu_of(8, 1e-5),
    "gdp_tpr(mu=1, fpr=0.05)": lambda: gaussian.tpr(1, 0.05),
    "sqrt(H0_paper(rho=1.61051, T=600))  [claimed, in units of gamma sqrt(m)/sigma]": lambda: math.sqrt(
        noisy_fedavg.optimum_as_printed(1.61051, 600)
    ),
    "sqrt(H0_paper(rho=2, T=10))  [claimed, in units of gamma sqrt(m)/sigma]": lambda: math.sqrt(
        noisy_fedavg.optimum_as_printed(2, 10)
    ),
    "exact_002_linear(lr=.1,V=10,K=5,T=600,m=50,sigma=1)": _exact_linear,
    "claim_002_prox(V=10,alpha=.1,L=.05,T=600,m=50,sigma=1)": lambda: noisy_fedavg.claim_fedprox(
        clip=10, proximal=0.1, smoothness=0.05, rounds=600, clients=50, noise_std=1
    ),
    "exact_002_prox_linear(V=10,alpha=1,eta=.1,K=50,T=600,m=50,sigma=1)": lambda: noisy_fedavg.linear_loss_mu(
        _gammas(StepRates.CONSTANT, 0.1, 10, 50, 600, 50, alpha=1), 50, 1
    ),
    "lambda_1 of the equality case, rho=1.05 T=10": lambda: noisy_fedavg.equality_coefficient(1.05, 10),
    "smallest z/mu for gamma_t<=(2zV/m)ln((t+2)/(t+1)): H_5/ln 2": lambda: math.fsum(1 / k for k in range(1, 6)) / math.log(2),
    "(c) exact: sqrt(sum_{t<100} 1/(t+1)^2)": _stage_wise,
    "sqrt(si_last_iterate_const(rho=1.05, gamma=0.01, T=1000, D=1.0))": lambda: _const(1.05, 0.01, 1000, 1),
    "sqrt(si_last_iterate_const(rho=1.05, gamma=0.01, T=2000, D=1.0))": lambda: _const(1.05, 0.01, 2000, 1),
    "sqrt(si_last_iterate_const(rho=0.95, gamma=0.01, T=100, D=1.0))": lambda: _const(0.95, 0.01, 100, 1),
    "sqrt(si_last_iterate_const(rho=0.95, gamma=0.1, T=100, D=1.0))": lambda: _const(0.95, 0.1, 100, 1),
    "sqrt(si_last_iterate_const(rho=1.2, gamma=0.3, T=12, D=2.0))": lambda: _const(1.2, 0.3, 12, 2),
    "si_last_iterate_general(rho=[1.1,.9,1.3,1,1.2,.8], gamma=[.5,.4,.3,.6,.2,.1], D=[-,1,1.5,.7,2,.9], "
    "sigma=[1,1.2,.8,1,1.5,.9])": _general,
    "si_continuous_H(rho=1.05,gamma=.01,D=1)=(rho+1)D(2gamma+(rho-1)D)": lambda: last_iterate.continuous_optimum(1.05, 0.01, 1),
    "exact delta at the paper's c, eps=0.2, target 0.02": lambda: ladp.delta_as_printed(0.2, 0.02),
    "exact delta at the paper's c, eps=0.5, target 0.02": lambda: ladp.delta_as_printed(0.5, 0.02),
    "exact delta at the paper's c, eps=0.5, target 1e-05": lambda: ladp.delta_as_printed(0.5, 1e-5),
    "eps at which the paper's c stops being sufficient for delta=.02": lambda: ladp.sufficient_up_to(0.02),
    "scale_leak_delta(dim=1728, ratio=1.01, eps=1.0)": lambda: ladp.scale_leak_delta(1728, 1.01, 1),
    "scale_leak_delta(dim=1000, ratio=1.05, eps=1.0)": lambda: ladp.scale_leak_delta(1000, 1.05, 1),
    "scale_leak_delta(dim=100, ratio=1.479699, eps=10.0)": lambda: ladp.scale_leak_delta(100, 1.479699, 10),
    "KL(softmax(w+u)||softmax(w)), n=512, w_i=.2((7i mod 512)-256)/512, u_i=.1 w_{(5i+3) mod 512}": _softmax_kl,
    "claimed eps, T=40, sigma=.3, delta=.1": lambda: fedglp.claimed_epsilon(0.3, 40, 0.1),
    "certified local mu=sqrt(nT)/sigma (zero-out), n=10, T=20, that sigma": lambda: fedglp.upload_mu(_sigma_at_two(), 10, 20),
    "eps(1e-5) of that": lambda: gaussian.epsilon_of(fedglp.upload_mu(_sigma_at_two(), 10, 20), 1e-5),
    "claimed eps d=44426 gamma=0.5 beta=0.5 delta=1e-5": lambda: fedanc.claimed_epsilon(0.5, 0.5, 44426, 1e-5),
    "claimed eps d=61706 gamma=0.1 beta=0.7 delta=1e-5": lambda: fedanc.claimed_epsilon(0.7, 0.1, 61706, 1e-5),
    "exact eps(1e-5), fixed mask, replace, beta=.5: gdp_eps(4,1e-5)": lambda: gaussian.epsilon_of(fedanc.release_mu(0.5), 1e-5),
    "secagg n=10, beta=1, 50 rounds, one noise per round, zero-out: gdp_eps(sqrt(5),1e-5)": lambda: gaussian.epsilon_of(
        fedanc.release_mu(1, 50, ZERO, aggregated=10), 1e-5
    ),
    "sigma/Delta = sqrt(2 ln(1.25/1e-7))/4": lambda: claim.claimed_std(4, 1e-7, 1),
    "tn_delta_1d(sigma=0.3, b=1.0, shift=0.3, eps=1.0)": lambda: claim.delta_1d(0.3, 1, 0.3, 1),
    "tn_delta_1d(sigma=0.5, b=1.0, shift=0.4, eps=0.5)": lambda: claim.delta_1d(0.5, 1, 0.4, 0.5),
    "tn_delta_1d(sigma=1.0, b=1.0, shift=0.2, eps=1.0)": lambda: claim.delta_1d(1, 1, 0.2, 1),
    "tn_delta_1d(sigma=2.0, b=1.0, shift=1.5, eps=0.1)": lambda: claim.delta_1d(2, 1, 1.5, 0.1),
    "tn_delta_inf(sigma=0.3, b=1.0, shift=0.3)": lambda: claim.delta_floor(0.3, 1, 0.3),
    "tn_delta_inf(sigma=2.0, b=1.0, shift=1.5)": lambda: claim.delta_floor(2, 1, 1.5),
    "delta_inf, dim=1000, equal spread of ||v||=.3, sigma=.3, b=1": lambda: (
        -math.expm1(1000 * math.log1p(-claim.delta_floor(0.3, 1, 0.3 / math.sqrt(1000))))
    ),
    "mu_groups([.5,.3,.2],[1,.6,.2])": lambda: gaussian.mu_groups([0.5, 0.3, 0.2], [1, 0.6, 0.2]),
    "mu_groups_joint([.5,.3,.2],[1,.6,.2],.5)": lambda: gaussian.mu_groups_joint([0.5, 0.3, 0.2], [1, 0.6, 0.2], 0.5),
    "rdp_sgm_int(q=0.01, noise_mult=1.0, alpha=8)": lambda: float(subsampled.rdp(0.01, 1, [8.0], adjacency=ZERO)[0]),
    "rdp_sgm_int(q=0.1, noise_mult=1.0, alpha=3)": lambda: float(subsampled.rdp(0.1, 1, [3.0], adjacency=ZERO)[0]),
    "rdp_sgm_int(q=0.01, noise_mult=0.8, alpha=2)": lambda: float(subsampled.rdp(0.01, 0.8, [2.0], adjacency=ZERO)[0]),
    "eps(1e-5) of 1000 SGM steps q=.01 z=1, integer alpha in 2..199, CKS": lambda: subsampled.epsilon_rdp(
        0.01, 1, 1000, 1e-5, orders=[float(a) for a in range(2, 200)], adjacency=ZERO
    ),
    "one SGM step, q=.1, mu=1, eps=.5, exact delta (remove direction)": lambda: subsampled.one_step_delta(0.1, 1, 0.5)[0],
    "one SGM step, q=.1, mu=1, eps=.05, exact delta (add direction)": lambda: subsampled.one_step_delta(0.1, 1, 0.05)[1],
}


def test_every_reference_value_has_a_call_and_every_call_a_value() -> None:
    assert set(CALLS) == set(ORACLES)


@pytest.mark.parametrize("expr", list(ORACLES))
def test_reference_value(expr: str) -> None:
    assert CALLS[expr]() == pytest.approx(ORACLES[expr], rel=1e-9, abs=0)
