"""Who sees no single upload is credited with the noise of all of them only where the server makes nothing but their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from scipy.signal import fftconvolve
from scipy.stats import norm

import method_kit as h
from federation_runs import config, job
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify
from fedveil.federation.fit import _server_uploads
from fedveil.federation.progress import Federation
from fedveil.federation.server import evaluation_figures, server_step
from fedveil.mechanism.plan import COUNTS, Released, Upload
from fedveil.methods.base import Fixed, MethodConfig, Release, Summed, SumServer, UploadServer, gaussian_plan, mean
from fedveil.methods.run_cost import check_declared, is_sum_equivalent
from fedveil.methods.setting import Setting
from fedveil.papers.aldp_fl.baselines import LDPFed
from fedveil.papers.ladp_fl.baselines import NbAFL
from fedveil.training.local import State

N, Z = 50, 0.5


def setting(**changes: Any) -> Setting:
    common = {"clients": N, "cohort": N, "rounds": 1, "delta": 1e-5, "noise_multiplier": Z}
    return h.setting(layers={"w": (3, 2)}, **{**common, **changes})


def epsilons(method: Any, s: Setting) -> list[float]:
    """Proven of the server, of the sums, and of the last model."""
    return [view.proven.epsilon for view in certify(method, s).views]


class Plus(MethodConfig):
    """Constant clip and noise, and the default mean."""

    name: Literal["plus"] = "plus"
    clip: float = 1.0

    def release(self, s: Setting) -> Release:
        return Fixed(gaussian_plan(s, self.clip))


class Weighted(Plus):
    weighting: Literal["uniform", "examples"] = "examples"


class MedianServer(UploadServer):
    def step(self, s: Setting, state: State, uploads: Sequence[Upload]) -> tuple[State, torch.Tensor]:
        return state, torch.stack([upload.vector for upload in uploads]).median(0).values


class Median(Plus):
    def server(self, s: Setting) -> UploadServer:
        return MedianServer()


class HalfServer(SumServer):
    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, torch.Tensor]:
        return state, total.vector / 2


class Halved(Plus):
    def server(self, s: Setting) -> SumServer:
        return HalfServer()


class Clamped(Plus):
    def release(self, s: Setting) -> Release:
        return Fixed(replace(gaussian_plan(s, self.clip), clamp=1.0))


def test_a_plain_sum_has_the_noise_of_all_uploads_but_one_that_a_client_knows() -> None:
    one, all_of_them = (epsilon_of(m, 1e-5) for m in (1 / Z, 1 / (Z * math.sqrt(N - 1))))
    for method in (Plus(), Halved(), Weighted(weighting="uniform")):
        assert epsilons(method, setting()) == pytest.approx([one, all_of_them, all_of_them], rel=1e-6)
    assert is_sum_equivalent(NbAFL(), setting())


@pytest.mark.parametrize("method", [Median(), Weighted(), Clamped(), LDPFed()], ids=lambda method: type(method).__name__)
def test_what_is_no_plain_sum_inherits_the_servers_number(method: Any) -> None:
    assert epsilons(method, setting()) == pytest.approx([epsilon_of(1 / Z, 1e-5)] * 3, rel=1e-6)
    texts = " ".join(text for view in certify(method, setting()).views for text in view.proven.assumptions)
    assert "no upload is missing" not in texts
    check_declared(method, setting(), torch.zeros(6))
    assert not is_sum_equivalent(Median(), setting())


def test_the_old_number_of_uploads_that_are_clamped_one_by_one_is_refuted() -> None:
    """The others' updates lie at the bound, where a clamp cuts half of their noise off; uploads are rounded down to a grid.

    So S_floor <= S <= S_floor + n h for the sum S of one coordinate, and S >= t is at least as likely as S_floor >= t where the
    client was zeroed, and at most as likely as S_floor >= t - n h where it has -C.
    """
    old = epsilon_of(1 / (Z * math.sqrt(N)), 1e-5)
    step = 1 / 1000
    cells = np.arange(-1000, 1001) * step

    def floored(centre: float) -> Any:
        return np.diff(norm.cdf((np.concatenate([[-np.inf], cells[1:], [np.inf]]) - centre) / Z))

    others = np.ones(1)
    for _ in range(N - 1):
        others = np.maximum(fftconvolve(others, floored(1.0)), 0)
    zeroed, present = (np.cumsum(np.maximum(fftconvolve(others, floored(x)), 0)[::-1])[::-1] for x in (0.0, -1.0))
    slack = N + 1
    delta = float((zeroed[slack:] - math.exp(old) * present[:-slack]).max())
    assert delta > 1e-3 > 1e-5
    assert certify(LDPFed(), setting()).view(View.AGGREGATE).proven.epsilon > 3 * old


def test_a_method_that_claims_the_sum_of_clamped_noise_is_refused() -> None:
    class Claims(Clamped):
        def releases(self, s: Setting, view: View) -> Any:
            return Plus().releases(s, view)

    with pytest.raises(ConfigError, match="in the aggregate view"):
        check_declared(Claims(), setting(), torch.zeros(6))


def test_rounds_that_a_cap_on_participations_empties_are_credited_with_no_sum() -> None:
    """12 clients, 8 a round, each at most twice in 4 rounds: the sampler made rounds of 8, 8, 7 and 1 of them."""
    some = {"clients": 12, "cohort": 8, "rounds": 4, "noise_multiplier": 3.0, "max_participations": 2}
    server, sums, last = epsilons(Plus(), setting(**some))
    worst = epsilon_of(math.sqrt(1 + 1 / 7) / 3, 1e-5)  # in the last two rounds
    assert server == sums == last > worst > epsilon_of(math.sqrt(2 / 8) / 3, 1e-5)
    assert is_sum_equivalent(Plus(), setting(**some, min_survivors=8))
    assert is_sum_equivalent(Plus(), setting(**{**some, "max_participations": 4}))


def shifted(there: Federation, uploads: list[Upload], by: torch.Tensor) -> list[Upload]:
    """The same uploads with integers moved from one to another, so that their sum stays."""
    moved = torch.stack([torch.as_tensor(upload.integers) for upload in uploads])
    moved[0] += by
    moved[1] -= by
    return [there.context.door.decoded(u, integers, u.plan) for u, integers in zip(uploads, moved, strict=True)]


def test_the_server_makes_the_same_model_of_uploads_of_equal_sums(tmp_path: Path) -> None:
    """To the bit: a mean of floats is no function of the sum."""
    privacy = {"view": "server", "evaluation": {"share": 0.4, "examples": 4}}
    there = job(config({"name": "dp-fedavg"}, "server", data={"client_test_fraction": 0.25}, privacy=privacy), tmp_path)
    door, model = there.context.door, there.context.model.vector
    plan = there.context.plan(Released(0, model, None), {})
    extras = {COUNTS: torch.tensor([3.0, 1.0])}
    uploads = [door.upload(torch.full_like(model, 0.01 * c), plan, c, 0, extras=extras) for c in range(3)]
    integers = uploads[0].integers
    assert integers is not None
    step = torch.from_numpy(np.random.default_rng(0).integers(-(2**25), 2**25, len(integers)))
    others = shifted(there, uploads, step)
    assert not torch.equal(mean(uploads), mean(others))
    first, second = (_server_uploads(there, seen) for seen in (uploads, others))
    assert torch.equal(*(server_step(there.method, there.setting, {}, seen, model)[1] for seen in (first, second)))
    assert torch.equal(*(seen[0].extras[COUNTS] for seen in (first, second)))
    torch.testing.assert_close(first[0].vector, mean(uploads))
    first_figures, each = (evaluation_figures(there.setting, seen, 3) for seen in (first, uploads))
    assert first_figures == pytest.approx(each, rel=1e-5)


@pytest.mark.parametrize("method", ["ldp-fed", "fedanc"])
def test_uploads_that_do_not_add_up_reach_the_method_one_by_one(method: str, tmp_path: Path) -> None:
    own = {"pretraining_steps": 20} if method == "fedanc" else {}
    there = job(config({"name": method, **own}, "server"), tmp_path)
    model = there.context.model.vector
    plan = there.context.plan(Released(0, model, None, client=0), there.context.policy.start())
    uploads = [there.context.door.upload(torch.zeros_like(model), plan, c, 0) for c in range(2)]
    assert _server_uploads(there, uploads) is uploads
