"""FedADDP: one round against the authors' program, its noise by hand, what fails in it, and the proven form in public units."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import method_kit as h
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Unbounded, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Upload
from fedveil.papers.fedglp_adp.claim import fedaddp_noise
from fedveil.papers.fedglp_adp.fisher_baselines import FedADDP, RangedNoise, magnitude, unit
from fedveil.training.local import train
from fisher_clients import X, Y, as_recorded, client

THEIRS = [-0.01, -0.01, 0.01, -0.008908, -0.004446, -0.000212, 0.004835, -0.009236, -0.05365, 0.01, 0.01, -0.01, -0.01, -0.007428]
THEIRS += [-0.134844, -0.01, 0.002483, -0.123468, 0.01, -0.01, 0.075099, 0.000127, 0.152091]
RANGES = [0.045127, 0.035921, 0.026738, 0.017816, 0.008892, 0.000424, 0.00967, 0.018472, 0.023233, 0.036825, 0.045948, 0.054968]
RANGES += [0.020057, 0.014856, 0.037481, 0.025204, 0.004966, 0.002752, 0.035204, 0.054966, 0.083286, 0.000254, 0.085899]
OWN = [
    -0.46,
    -0.369091,
    -0.258182,
    -0.187273,
    -0.096364,
    -0.005455,
    0.105455,
    0.176364,
    0.223623,
    0.378182,
    0.469091,
    0.54,
    -0.21,
]
OWN += [0.14, 0.365156, -0.26, -0.04, 0.035156, 0.36, 0.54, 0.825099, 0.01, 0.852091]
LENGTH = 0.348951
"""What `local_update` of fedaddp.py makes of `client` after a round whose ranges came to 0.2: the clamped model less the global
one, 2 q, the client's own model, and the length for the next round."""


def trained(method: FedADDP, sigma: float | None, normal: Any = torch.zeros) -> tuple[torch.Tensor, Any]:
    local = client(1, length=0.2)
    local.normal = normal
    objective = RangedNoise(method, replace(h.setting(), layout=local.model.layout), sigma)
    return train(local, X, Y, objective)[0], local


def test_one_round_is_that_of_the_authors_program(monkeypatch: pytest.MonkeyPatch) -> None:
    as_recorded(monkeypatch)
    update, local = trained(FedADDP(variant="published"), 2.0)
    assert update.tolist() == pytest.approx(THEIRS, abs=2e-6)
    assert local.state["personal"].tolist() == pytest.approx(OWN, abs=2e-6)
    assert local.state["length"] == pytest.approx(LENGTH, rel=1e-5)
    noisy, other = trained(FedADDP(variant="published"), 2.0, torch.ones)
    stds = [math.sqrt(4) * 2.0 * r for r in RANGES]  # four tensors
    assert (noisy - update).tolist() == pytest.approx(stds, abs=5e-6)
    assert float(other.noise_power.sum()) == pytest.approx(sum(s * s for s in stds), rel=1e-4)


def test_sigma_0_of_the_program() -> None:
    """20 rounds, delta = 0.1: 10.9, 3.4 and 1.2 for epsilon 1, 4 and 16 (docs)."""
    assert [round(fedaddp_noise(e, 20, 0.1), 1) for e in (1, 4, 16)] == [10.9, 3.4, 1.2]
    # by hand: epsilon = 16: a = ceil(3.32 / 16 + 1) = 2, 20 * 2 / (2 (16 - 2.3026))
    assert fedaddp_noise(16, 20, 0.1) == pytest.approx(math.sqrt(20 / (16 - math.log(10))))


def test_tensors_are_counted_where_coordinates_are_noised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two neighbours are 2 q apart in each of d coordinates, and the noise is that of M: mu^2 = d / (M sigma_0^2) a round."""
    as_recorded(monkeypatch)
    sigma = fedaddp_noise(16, 20, 0.1)
    noisy, _ = trained(FedADDP(variant="published"), sigma, torch.ones)
    quiet, _ = trained(FedADDP(variant="published"), sigma)
    mu = math.sqrt(20 * float((torch.tensor(RANGES) / (noisy - quiet)).square().sum()))
    assert mu == pytest.approx(math.sqrt(20 * 23 / 4) / sigma, rel=1e-2)
    assert epsilon_of(mu, 0.1) > 2 * 16


# --- proven ------------------------------------------------------------------------------------------------------------


def test_range_and_unit_follow_the_global_model_alone() -> None:
    w = torch.tensor([3.0, -4.0, 0.0, 0.0])
    assert magnitude(w, 0.1).tolist() == pytest.approx([3, 4, 0.25, 0.25])
    assert float(unit(w, 0.1).square().mean()) == pytest.approx(1)
    assert magnitude(torch.zeros(2), 0.1).tolist() == pytest.approx([0.1, 0.1])


def test_proven_update_is_clamped_in_units_and_scaled_back_by_the_server() -> None:
    method = FedADDP(beta=0.01, floor=0.2)
    update, local = trained(method, None)
    personal, w = local.scratch["split"].personal, local.start
    reach = 0.005 * magnitude(w, 0.2)
    moved = (local.state["personal"] - w).clamp(-reach, reach) * ~personal
    assert (update * unit(w, 0.2)).tolist() == pytest.approx(moved.tolist(), abs=1e-7)
    assert (moved.abs() == reach).any()
    uploads = [Upload(0, 0, u, torch.zeros(4), Plan()) for u in (update, torch.zeros(23))]
    assert h.stepped(method, uploads, w).tolist() == pytest.approx((moved / 2).tolist(), abs=1e-7)


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_proven_costs_the_configured_epsilon(view: str) -> None:
    job = h.job_of(h.at_epsilon_8({"name": "fed-addp"}, f"privacy.view={view}"))
    h.trained(job)
    for client_number in range(6) if view == "server" else [-1]:
        assert 0.999 * 8.0 < epsilon_of(math.sqrt(h.book(job).mu2(client_number)), 1e-3) <= 8.0


def test_published_promises_nothing_and_says_what_it_reads() -> None:
    job = h.job_of(h.at_epsilon_8({"name": "fed-addp", "variant": "published"}, "privacy.view=server"))
    h.trained(job)
    assert all(isinstance(e.event, Unbounded) and e.reads == ("weights", "gradients") for e in h.book(job).entries)
    claim = job.method.claim(job.setting)
    assert claim is not None
    assert (claim.epsilon, claim.scope.view) == (8.0, View.SERVER)
    method = FedADDP(variant="published")
    for wrong in (h.setting(), h.setting(View.AGGREGATE), replace(h.setting(noise_multiplier=None))):
        with pytest.raises(ConfigError, match=r"view = 'server'|either privacy\.epsilon or method\.sigma"):
            method.calibrate(wrong)


def test_it_learns_personal_models() -> None:
    skewed = {"partition": {"kind": "dirichlet", "clients": 20, "alpha": 0.1}, "client_test_fraction": 0.3}
    adam = ("training.optimizer.name=adam", "training.optimizer.lr=0.01")
    config = h.digits({"name": "fed-addp"}, *adam, rounds=6, data=skewed, privacy={"epsilon": 8.0})
    last = h.trained(h.job_of(config)).history[-1]
    assert last["mean_personal_accuracy"] > 0.35
    assert 0 < last["mask_share"] < 0.5
