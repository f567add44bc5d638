"""NbAFL: each formula on numbers worked out by hand, the two noises derived a second way, and what the proven variant costs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Unbounded, View
from fedveil.mechanism.plan import Plan, reason_of
from fedveil.papers.ladp_fl.baselines import NbAFL
from fedveil.papers.ladp_fl.claim import nbafl_broadcast_std, nbafl_upload_std
from method_kit import (
    digits,
    job_of,
    planner,
    released,
    setting,
    stepped,
    trained,
    upload,
)

C_002 = math.sqrt(2 * math.log(62.5))
LADP = {"local_epochs": 2, "batch_size": 50, "batch_clip": 20.0}


def ladp(**changes: Any) -> Any:
    """LaDP-FL's setting: 100 clients of 500 records, 10 a round, 400 rounds."""
    base = {"training": LADP, "epsilon": 0.2, "noise_multiplier": None, "delta": 0.02}
    return setting(**{**base, "clients": 100, "cohort": 10, "rounds": 400, "records": 500, **changes})


# --- formulas ---


def test_upload_noise_by_hand() -> None:
    """C = 10, n_min = 100: 2 C / n_min = 0.2; c = sqrt(2 ln 62.5) = 2.87582; L = 25; epsilon = 50: 0.28758."""
    assert pytest.approx(2.875819, rel=1e-6) == C_002
    assert nbafl_upload_std(50.0, 0.02, 10.0, 100, 25) == pytest.approx(C_002 * 25 * 0.2 / 50)


def test_broadcast_noise_by_hand() -> None:
    """N = K = 4, L = 1, T = 10: sqrt(100 - 4) = 9.798; 2 c C / (n N epsilon) = 2 * 2.87582 * 10 / (100 * 4 * 50)."""
    one = nbafl_upload_std(50.0, 0.02, 10.0, 100, 1)
    found = nbafl_broadcast_std(one, 50.0, 1, 10, 4, 4)
    assert found == pytest.approx(2 * C_002 * 10 * math.sqrt(96) / (100 * 4 * 50))
    assert nbafl_broadcast_std(one, 50.0, 10, 10, 4, 4) == 0


@given(st.integers(2, 60), st.integers(1, 60), st.integers(1, 100), st.integers(1, 30), st.floats(0.5, 200))
def test_the_server_fills_up_to_what_all_broadcasts_need(n: int, cohort: int, rounds: int, seen: int, epsilon: float) -> None:
    """sigma_U^2 / K + sigma_D^2 = (c T Delta_D / (b epsilon))^2 with Delta_D = 2 C / (K n_min), where the first alone is less."""
    cohort, seen = min(cohort, n), min(seen, rounds)
    up = nbafl_upload_std(epsilon, 0.02, 3.0, 50, seen)
    down = nbafl_broadcast_std(up / seen, epsilon, seen, rounds, n, cohort)
    inside = 1 - n / cohort + n / cohort * math.exp(-epsilon / rounds)
    gamma = -math.log(1 - cohort / n + cohort / n * math.exp(-epsilon / (seen * math.sqrt(cohort))))
    assert (down > 0) == (rounds > epsilon / gamma * (1 + 1e-12)) or down == pytest.approx(0, abs=1e-5 * up)
    if down > 0:
        b = -rounds / epsilon * math.log(inside)
        needed = C_002 * rounds * (2 * 3.0 / (cohort * 50)) / (b * epsilon)
        assert up**2 / cohort + down**2 == pytest.approx(needed**2, rel=1e-6)


def test_full_dp_of_ladp_fl_is_twice_its_own_noise() -> None:
    """c 2 eta E G_c / epsilon = 2.87582 * 8 / 0.2 = 115.03 on every weight; Theorem 3 at P = B has 57.10."""
    from fedveil.papers.ladp_fl.method import LaDPFL

    full = NbAFL(variant="published", source="ladp-fl").noise_std(ladp())
    assert full == pytest.approx(115.03275, rel=1e-6)
    assert LaDPFL(variant="published").unit_std(ladp()) == pytest.approx(57.10, abs=0.01)
    ratios = [
        LaDPFL(variant="published").unit_std(ladp(epsilon=e))
        / NbAFL(variant="published", source="ladp-fl").noise_std(ladp(epsilon=e))
        for e in (0.2, 0.3, 0.4, 0.5)
    ]
    assert ratios == pytest.approx([0.4964, 0.5078, 0.5187, 0.5292], abs=1e-4)


def test_noise_of_the_public_code_by_hand() -> None:
    """FederatedScope at C = 2, T = 10, n = 100, epsilon = 20: 2 * 10 c / 2000 an upload; 10 > 4 sqrt(4), so the server adds.

    nbafl_scale_u = w_clip T constant / n / epsilon; scale_d = 2 w_clip constant sqrt(T^2 - K^2 N) / (n N epsilon) of K clients.
    """
    s = setting(epsilon=20.0, noise_multiplier=None, delta=0.02, clients=4, cohort=4, rounds=10)
    own, added = 2 * 10 * C_002 / 100 / 20, 2 * 2 * C_002 * math.sqrt(100 - 16 * 4) / (100 * 4 * 20)
    assert NbAFL(variant="published", source="repo", clip=2.0).noise_std(s) == pytest.approx(math.hypot(own, 2 * added))


# --- what leaves ---


def test_weights_leave_and_the_server_moves_to_their_mean() -> None:
    method = NbAFL(clip=1.0)
    uploads = [upload([1.0] * 7, [0.0] * 7), upload([3.0] * 7, [0.0] * 7)]
    assert stepped(method, uploads, torch.full((7,), 0.5)).tolist() == [1.5] * 7
    clamped = stepped(NbAFL(variant="published", source="repo", clip=0.75), uploads, torch.full((7,), 0.5))
    assert clamped.tolist() == [0.25] * 7
    assert stepped(NbAFL(variant="published", source="ladp-fl"), uploads, torch.zeros(7)).tolist() == [2.0] * 7


def test_published_plans_promise_nothing_and_say_why() -> None:
    for source, clip in (("paper", 5.0), ("repo", math.inf), ("ladp-fl", math.inf)):
        method = NbAFL(variant="published", source=source)
        s = ladp(epsilon=50.0 if source != "ladp-fl" else 0.2)
        plan = planner(method, s).plan(released([0.0] * 7), {})
        assert isinstance(plan, Plan)
        assert (plan.clip, plan.noise_std) == (clip, method.noise_std(s))
        assert reason_of(plan)
        assert all(isinstance(e, Unbounded) for view in View for e in method.releases(s, view))


def test_claims() -> None:
    """Paper: epsilon of L uploads; beside it what 2 C gives. As LaDP-FL's baseline: q T epsilon."""
    s = setting(training=LADP, epsilon=50.0, noise_multiplier=None, delta=1e-3, rounds=4)
    method = NbAFL(variant="published", clip=2.0)
    claim = method.claim(s)
    assert claim is not None
    assert claim.epsilon == 50.0
    assert f"epsilon = {epsilon_of(2 * 2.0 * 2 / method.noise_std(s), 1e-3):.4g}" in claim.note
    assert "above 5e+05" in (NbAFL(variant="published", clip=2.0).claim(replace(s, epsilon=1e4)) or claim).note
    rounds = NbAFL(variant="published", source="ladp-fl").claim(ladp(delta=1e-3))
    assert rounds is not None
    assert rounds.epsilon == pytest.approx(0.1 * 400 * 0.2)
    assert NbAFL().claim(s) is None


# --- runs ---


@pytest.mark.parametrize("source", ["paper", "repo"])
def test_it_learns_at_the_claimed_epsilon_of_the_paper(source: str) -> None:
    """12 clients of 120 digits, epsilon 50 claimed for record level, 3 rounds: above 0.6 (chance is 0.1), twice the same."""
    config = digits({"name": "nbafl", "variant": "published", "source": source}, privacy={"epsilon": 50.0, "view": "server"})
    first, again = (trained(job_of(config)) for _ in range(2))
    assert first.history[-1]["test_accuracy"] > 0.6
    assert first.model.equal(again.model)
