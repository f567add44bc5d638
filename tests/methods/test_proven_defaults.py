"""Defaults of the proven variants: chosen on public data, and such that noise never feeds on itself."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import federation
from federation_runs import config
from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.experiment.config_files import read_config
from fedveil.experiment.resume import same_run
from fedveil.experiment.run_directory import write_config
from fedveil.experiment.sections import given_keys
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.methods.fedavg import DPFedAvg
from fedveil.methods.method import Method
from fedveil.methods.method_registry import description, method_from
from fedveil.papers.aldp_fl.method import ALDPFL
from fedveil.papers.fedanc.method import FedANC
from fedveil.papers.fedglp_adp.method import FedGLPADP
from fedveil.papers.ladp_fl.method import LaDPFL
from fedveil.studies.compare.comparison import default_out

ROUNDS, CLIENTS = 100, 4
Z = 20.0
"""Epsilon 1.3 at delta 1e-3 over these rounds; clients without examples send nothing but noise."""


def test_each_variant_has_its_own() -> None:
    assert (FedANC().gamma_min, FedANC(variant="published").gamma_min) == (0.8, 0.1)
    proven, published = FedGLPADP(), FedGLPADP(variant="published")
    assert (proven.gamma, proven.beta0, proven.slope, proven.personal_model) == (0.05, 0.1, 0.0, "combined")
    assert (published.gamma, published.beta0, published.slope, published.personal_model) == (0.4, 0.3, 0.2, "trained")


def test_what_is_given_stays_and_a_default_does_not_count_as_given() -> None:
    method = FedGLPADP(gamma=0.4)
    assert (method.gamma, method.beta0) == (0.4, 0.1)
    assert given_keys(method) == {"name": "fedglp-adp", "gamma": 0.4}
    assert method_from(method.model_dump()) == method
    assert "gamma_min = 0.8 (published: 0.1)" in description("fedanc")


@cache
def plain_norm() -> float:
    """Of the noise on each step of DP-FedAvg, which is the same in all rounds."""
    return noise_norms(DPFedAvg())[0]


def noise_norms(method: Method, view: View = View.AGGREGATE) -> list[float]:
    """Of the noise on the global step, round by round, of clients that have no examples: all that is released is noise."""
    empty: Any = ([], [])
    module = torch.nn.Sequential(torch.nn.Linear(2, 30), torch.nn.Linear(30, 2))
    training = {"rounds": ROUNDS, "optimizer": {"lr": 0.1}}
    job = federation(method, [empty] * CLIENTS, view=view, training=training, z=Z, module=module)
    progress = start(job)
    assert fit(job, Inline(job.context), progress) == ""
    return [row["noise_norm"] for row in progress.history]


PROVEN: list[Method] = [ALDPFL(), FedGLPADP(clip=1.0), FedANC(pretraining_steps=20), LaDPFL()]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", PROVEN, ids=lambda m: m.name)
def test_noise_alone_never_grows_far_above_that_of_dp_fedavg(method: Method) -> None:
    """At most T^(1/4) times as long: what FedANC's pace of 1.5 allows; the others stay lower."""
    plain, found = plain_norm(), noise_norms(method)
    assert len(found) == ROUNDS
    assert 0 < max(found) <= ROUNDS**0.25 * plain


@pytest.mark.slow
def test_clips_that_may_grow_follow_noise_upwards() -> None:
    """What the new range of ALDP-FL is for: within the former one and a wider, its windows take noise for movement."""
    plain = plain_norm()
    highest = [max(noise_norms(ALDPFL(bound=1e4, clip_range=(0.5, most)))) / plain for most in (1.0, 4.0, 16.0)]
    assert highest == pytest.approx([1.0, 4.0, 16.0], rel=1e-3)


def test_a_saved_configuration_holds_the_defaults_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no run, audit or comparison goes on with other ones when the defaults change."""
    made = config({"name": "fedanc", "pretraining_steps": 20})
    write_config(tmp_path / "config.toml", made.resolved())
    assert tomllib.loads((tmp_path / "config.toml").read_text())["method"]["gamma_min"] == 0.8
    monkeypatch.setattr(FedANC, "proven_defaults", {"gamma_min": 0.5})
    saved = read_config(tmp_path / "config.toml")
    assert saved.method == made.method
    same_run(saved, made, tmp_path)
    now = config({"name": "fedanc", "pretraining_steps": 20})
    with pytest.raises(ConfigError, match=r"method\.gamma_min was 0\.8 and is 0\.5"):
        same_run(saved, now, tmp_path)
    assert default_out(now) != default_out(made)
