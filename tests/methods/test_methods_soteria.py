"""Soteria: its scores by hand and as the public code computes them, what leaves, and what its quantile misses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import method_kit as h
from fedveil.accounting.types import Unbounded, View
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.federation.progress import start
from fedveil.mechanism.plan import Raw
from fedveil.methods.gradient_compression import last_matrix
from fedveil.papers.fedanc.baselines import Soteria, columns, sensitivities
from fedveil.training.params import FlatModel

SERVER = {"privacy": {"view": "server"}}


def net(weight: list[list[float]], bias: list[float]) -> FlatModel:
    """ReLU features of that weight, and one linear layer."""
    body, head = nn.Linear(len(weight[0]), len(weight)), nn.Linear(len(weight), 2)
    with torch.no_grad():
        body.weight.copy_(torch.tensor(weight))
        body.bias.copy_(torch.tensor(bias))
    return h.local_of(nn.Sequential(body, nn.ReLU(), head)).model


def test_representation_and_sensitivity_by_hand() -> None:
    model = net([[3.0, 4.0], [1.0, 0.0], [0.0, -2.0]], [0.0, 1.0, 0.0])
    r, sensitivity = sensitivities(model, "2.weight", torch.tensor([[1.0, 1.0], [0.0, -1.0]]))
    assert r.tolist() == [[7.0, 2.0, 0.0], [0.0, 1.0, 2.0]]
    assert sensitivity.tolist() == [[5.0, 1.0, 0.0], [0.0, 1.0, 2.0]], "rows of the weight where the unit is active"
    assert model.module.training
    # repo: 5/7.1 + 0, 1/2.1 + 1/1.1, 0 + 2/2.1; paper: 7/5, 2 + 1, 2/2
    assert columns(r, sensitivity, form="repo", rate=0.4).tolist() == [True, False, False]
    assert columns(r, sensitivity, form="paper", rate=0.4).tolist() == [False, True, False]


@pytest.mark.parametrize(("rate", "dropped"), [(0.1, [1]), (0.25, [1]), (0.6, [0, 1])])
def test_columns_are_those_of_the_public_code(rate: float, dropped: list[int]) -> None:
    """Scores and masks that the public code computes for this network and batch, recorded."""
    weight = torch.sin(torch.arange(1.0, 13.0)).view(4, 3)
    model = net(weight.tolist(), torch.sin(2 * torch.arange(1.0, 5.0)).tolist())
    x = torch.tensor([[1.0, -0.5, 0.25], [0.3, 0.8, -1.2], [-0.7, 0.2, 0.9]])
    r, sensitivity = sensitivities(model, "2.weight", x)
    recorded = [3.266439199447632, 0.0, 3.9955544471740723, 4.614101409912109]
    assert (sensitivity / (r + 0.1)).sum(0).tolist() == pytest.approx(recorded, rel=1e-5)
    assert columns(r, sensitivity, form="repo", rate=rate).nonzero().flatten().tolist() == dropped


def test_dead_units_use_up_the_quantile() -> None:
    """A quantile below the share of dead units is 0, and nothing is below 0: no column is dropped."""
    r = torch.tensor([[0.0, 0.0, 1.0, 2.0]])
    sensitivity = torch.tensor([[0.0, 0.0, 3.0, 1.0]])
    assert columns(r, sensitivity, form="repo", rate=0.3).sum() == 0
    assert columns(r, sensitivity, form="paper", rate=0.3).tolist() == [False, False, False, True]


def test_a_negative_representation_misleads_the_public_code() -> None:
    """Scores of r < -0.1 are negative: their quantile is compared with absolute values, and no column is dropped."""
    r, sensitivity = torch.tensor([[-1.0, -0.6, 0.4]]), torch.tensor([[1.0, 1.0, 1.0]])
    assert (sensitivity / (r + 0.1)).sum(0).quantile(0.5) < 0
    assert columns(r, sensitivity, form="repo", rate=0.5).sum() == 0
    assert columns(r, sensitivity, form="paper", rate=0.5).tolist() == [True, False, False]


def test_dropped_columns_do_not_leave_and_all_else_does() -> None:
    job = h.job_of(h.digits({"name": "soteria"}, "model={name='mlp', hidden=[16]}", **SERVER))
    layout, policy = job.context.door.layout, job.context.policy
    update = torch.ones(layout.dimension)
    weight = layout.split(update)[last_matrix(layout) or 0].view(10, 16)
    weight[:, [2, 5]] = 0.0
    weight[3, 7] = 0.0  # an entry, not a column
    plan = policy.plan(h.released([0.0]), {})
    assert isinstance(plan, Raw)
    support = plan.make(update).support
    assert support is not None
    assert support.sum() == layout.dimension - 20


def test_each_batch_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_three(r: torch.Tensor, sensitivity: torch.Tensor, **options: Any) -> torch.Tensor:
        assert options == {"form": "repo", "rate": 0.6}
        return torch.arange(16) < 3

    monkeypatch.setattr("fedveil.papers.fedanc.baselines.columns", first_three)
    config = h.digits({"name": "soteria"}, "model={name='mlp', hidden=[16]}", rounds=1, **SERVER)
    job = h.job_of(config)
    layout, before = job.context.door.layout, start(job).model
    moved = h.trained(job).model - before
    weight = layout.split(moved)[last_matrix(layout) or 0].view(10, 16)
    assert not weight[:, :3].any()
    assert weight[:, 3:].any(0).all()


def test_it_learns() -> None:
    config = h.digits({"name": "soteria"}, "model={name='mlp', hidden=[16]}", "training.optimizer.lr=0.5", rounds=6, **SERVER)
    assert h.trained(h.job_of(config)).history[-1]["test_accuracy"] > 0.7


def test_nothing_is_proven_and_the_statement_says_why() -> None:
    config = h.digits({"name": "soteria"}, **SERVER)
    statement = certify_config(config)
    assert statement.variant == "published"
    assert all(math.isinf(view.proven.epsilon) for view in statement.views)
    assert "raw data choose the columns" in statement.own.proven.reason
    method, setting = calibrated_setting(config)
    assert isinstance(method.releases(setting, View.SERVER)[0], Unbounded)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": {"view": "aggregate"}}, "privacy.view = 'server'"),
        ({"privacy": {"view": "server", "epsilon": 8.0}}, "remove privacy.epsilon"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        calibrated_setting(h.digits({"name": "soteria"}, **changes))


def test_a_model_without_a_fully_connected_layer_is_refused() -> None:
    setting = h.setting(layers={"conv.weight": (3, 1, 2, 2), "conv.bias": (3,)}, noise_multiplier=None)
    with pytest.raises(ConfigError, match="fully connected"):
        Soteria().calibrate(setting)
