"""The server's step: its optimisers, a rate relative to the clip, and the model that is handed over in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from federation_runs import bits, config, finished, job
from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.federation.evaluation import DECAY
from fedveil.federation.fit import one_round
from fedveil.federation.progress import Progress, start
from fedveil.federation.round import Engine
from fedveil.methods.run_cost import events_in_view
from fedveil.training.optimizer import Optimizer
from resumed_runs import case, go, interrupted


def server(**options: Any) -> Config:
    return config({"name": "dp-fedavg", "clip": 0.5}, training={"rounds": 3, "local_steps": 2, "server_optimizer": options})


def models(configuration: Config, folder: Path) -> list[torch.Tensor]:
    """The global model before and after each round."""
    federation = job(configuration, folder)
    engine: Engine = Inline(federation.context)
    progress = start(federation)
    found = [progress.model]
    with engine:
        while progress.round < federation.setting.rounds:
            one_round(federation, engine, progress)
            found.append(progress.model)
    return found


def done(configuration: Config, folder: Path) -> Progress:
    federation = job(configuration, folder)
    return finished(federation, Inline(federation.context))


def test_a_rate_relative_to_the_clip_is_the_rate_divided_by_it(tmp_path: Path) -> None:
    """Clip 0.5 is a power of two, so the products are the same to the bit."""
    relative = done(server(lr=0.25, relative_to_clip=True, momentum=0.5), tmp_path / "a").model
    plain = done(server(lr=0.5, momentum=0.5), tmp_path / "b").model
    assert bits(relative) == bits(plain)


def test_with_a_relative_rate_the_clip_does_not_scale_the_step(tmp_path: Path) -> None:
    """Where every update is clipped, and without noise, halving the clip halves plain steps and leaves relative ones."""

    def moved(clip: float, **options: Any) -> torch.Tensor:
        changes: dict[str, Any] = {"training": {"rounds": 1, "server_optimizer": {"lr": 1.0, **options}}}
        method = {"name": "dp-fedavg", "clip": clip}
        private = {"epsilon": None, "noise_multiplier": 0.0}
        before, after = models(config(method, privacy=private, **changes), tmp_path / f"{clip}{options}")
        return after - before

    plain = moved(2e-3).norm() / moved(1e-3).norm()
    assert plain == pytest.approx(2, rel=1e-2)
    assert torch.allclose(moved(2e-3, relative_to_clip=True), moved(1e-3, relative_to_clip=True), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("method", [{"name": "aldp-fl", "clip_range": [1.0, 1.0]}, {"name": "fedglp-adp", "gamma": 0.0}])
def test_clips_of_layers_bound_the_update_by_their_norm(method: dict[str, Any], tmp_path: Path) -> None:
    """Their squares add up to C^2, so that a rate relative to the clip is the rate divided by C; it was divided by infinity."""
    fixed = {"clip": 0.5, "beta0": 0.0} if method["name"] == "fedglp-adp" else {"clip": 0.5}

    def moved(**options: Any) -> torch.Tensor:
        changes = {"training": {"rounds": 1, "server_optimizer": options}}
        before, after = models(config({**method, **fixed}, **changes), tmp_path / str(len(options)))
        return after - before

    step = moved(lr=0.25, relative_to_clip=True)
    assert step.norm() > 0
    assert torch.allclose(step, moved(lr=0.5), rtol=1e-5, atol=1e-7)


def test_a_relative_rate_needs_a_clip_of_whole_updates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"relative_to_clip = true divides by the clip"):
        job(config({"name": "fedavg"}, training={"server_optimizer": {"relative_to_clip": True}}), tmp_path)


def built(**options: Any) -> Optimizer:
    """The optimiser that a configuration describes."""
    return configure(training={"server_optimizer": options}).training.server_optimizer.spec().build()


def test_betas_and_eps_are_those_of_torch() -> None:
    torchs = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    ours, other = torchs.detach().clone(), torch.optim.Adam([torchs], 0.1, betas=(0.5, 0.8), eps=1e-3, foreach=False)
    optimizer = built(name="adam", lr=0.1, betas=(0.5, 0.8), eps=1e-3)
    for step in range(4):
        torchs.grad = torch.tensor([1.0, 0.3 * step])
        optimizer.step(ours, torchs.grad)
        other.step()
    assert torch.equal(ours, torchs.detach())


def test_yogi_by_hand() -> None:
    """Reddi et al. 2021, Algorithm 2, with two steps of gradients 2 and 1 on one coordinate."""
    vector, optimizer = torch.tensor([0.0], dtype=torch.float64), built(name="yogi", lr=0.1, betas=(0.5, 0.75), eps=0.5)
    optimizer.step(vector, torch.tensor([2.0], dtype=torch.float64))
    mean, second = 0.5 * 2.0, 0.25 + 0.25 * 4.0  # v grows: the square is larger than it
    by_hand = -0.1 * mean / (second**0.5 + 0.5)
    assert float(vector) == pytest.approx(by_hand, rel=1e-12)
    optimizer.step(vector, torch.tensor([1.0], dtype=torch.float64))
    mean, second = 0.5 * mean + 0.5 * 1.0, second - 0.25 * 1.0  # v shrinks: the square is smaller
    assert float(vector) == pytest.approx(by_hand - 0.1 * mean / (second**0.5 + 0.5), rel=1e-12)


def test_options_of_another_optimiser_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.eps belongs to 'adam' and 'yogi'"):
        configure(training={"server_optimizer": {"name": "sgd", "eps": 1e-3}})
    with pytest.raises(ConfigError, match=r"relative_to_clip"):
        configure(training={"optimizer": {"relative_to_clip": True}})


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["tail", "ema"])
def test_the_model_that_is_handed_over_is_the_average_and_is_the_one_scored(kind: str, tmp_path: Path) -> None:
    configuration = config({"name": "dp-fedavg"}, training={"rounds": 6, "evaluate_every": 6}, run={"final_model": kind})
    each = [m.double() for m in models(configuration, tmp_path / "a")[1:]]
    weights = [0, 0, 0, 0, 1, 1] if kind == "tail" else [DECAY ** (5 - t) for t in range(6)]
    by_hand = sum(w * m for w, m in zip(weights, each, strict=True)) / sum(weights)
    result = go(configuration, tmp_path / "b")
    assert torch.allclose(result.model.vector.double(), by_hand, rtol=1e-6, atol=1e-8)
    last = go(config({"name": "dp-fedavg"}, training={"rounds": 6, "evaluate_every": 6}), tmp_path / "c")
    assert bits(last.model.vector) == bits(each[-1].float())
    assert result.history[-1]["test_loss"] != last.history[-1]["test_loss"]
    assert [r["update_norm"] for r in result.history] == [r["update_norm"] for r in last.history]


def test_an_average_survives_an_interruption_to_the_bit(tmp_path: Path) -> None:
    for kind in ("tail", "ema"):
        plain = case("dp-fedavg aggregate", training={"rounds": 6})
        configuration = plain.model_copy(update={"run": plain.run.model_copy(update={"final_model": kind})})
        go(configuration, tmp_path / f"{kind}-calm")
        interrupted(configuration, tmp_path / kind, 5)
        go(configuration, tmp_path / kind, resume=True)
        one, other = ((tmp_path / f"{kind}{end}" / "model.safetensors").read_bytes() for end in ("", "-calm"))
        assert one == other


def test_the_statement_says_what_is_handed_over() -> None:
    assert not any("post-processing" in note for note in certify_config(server(lr=1.0)).notes)
    tail = certify_config(config({"name": "dp-fedavg"}, training={"rounds": 9}, run={"final_model": "tail"}))
    assert "the model that is handed over is the mean of the models of the last 3 rounds" in tail.notes[0]


def test_a_bound_of_the_last_model_does_not_speak_of_an_average() -> None:
    """Noisy-FedAvg proves less for the last model than for all of them; an average of models gets the latter."""
    sections: dict[str, Any] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 10}},
        "model": {"name": "linear"},
        "method": {"name": "noisy-fedavg", "project_to": 0.01, "assumed_smoothness": 1.0},
        "training": {"rounds": 50, "batch_clip": 1.0, "local_steps": 1},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "view": "final", "adjacency": "replace_one"},
    }
    method, setting = calibrated_setting(configure(**sections))
    averaged, s = calibrated_setting(configure(**sections, run={"final_model": "tail"}))
    assert events_in_view(method, setting, View.FINAL) != events_in_view(method, setting, View.AGGREGATE)
    assert events_in_view(averaged, s, View.FINAL) == events_in_view(method, setting, View.AGGREGATE)
