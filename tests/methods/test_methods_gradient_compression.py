"""Gradient compression: one local step against the public code, the entries that leave, by hand, and that it learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import method_kit as h
from fedveil.experiment.certify import certify_config
from fedveil.methods.gradient_compression import quantile
from fedveil.models.model_registry import build

SERVER = {"privacy": {"view": "server"}}
X = torch.tensor([[1.0, -0.5, 0.25], [0.3, 0.8, -1.2], [-0.7, 0.2, 0.9]])
Y = torch.tensor([0, 1, 2])
GRADIENT = [
    *(-0.014242538250982761, 0.06051858514547348, -0.08132795244455338, -0.18689735233783722, 0.10380677878856659),
    *(0.07818777859210968, -0.37806540727615356, -0.0977877601981163, 0.5206387042999268, -0.050431959331035614),
    *(-0.2707347869873047, 0.4135737717151642, 0.012456715106964111, 0.1083972230553627, -0.11234131455421448),
    *(-0.20843631029129028, 0.09225793182849884, -0.10019572079181671, 0.011837390251457691, 0.0738091766834259),
    *(-0.18715202808380127, 0.1752803772687912, -0.06957948207855225, -0.09617792814970016, 0.09489410370588303),
    *(-0.07508465647697449, 0.05774209275841713, 0.022368740290403366, 0.14883573353290558, -0.17299063503742218),
    0.024154916405677795,
]
"""The gradient of a network of sines on X and Y as Soteria's `prune` and CENSOR's `gradient_compression` send it at 0 %."""
DROPPED = {
    0.1: [0, 9, 12, 18, 27, 30],
    0.2: [0, 1, 9, 12, 18, 26, 27, 30],
    0.6: [0, 1, 2, 4, 5, 7, 9, 12, 13, 16, 18, 19, 22, 25, 26, 27, 28, 30],
    0.9: [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 13, 14, 16, 17, 18, 19, 22, 23, 24, 25, 26, 27, 28, 30],
}
"""Positions in GRADIENT that the public code sets to zero: 10 % is Soteria's DLG, 60 % its GS attack, 20 % CENSOR's."""


def pruned(network: nn.Module, x: torch.Tensor, y: torch.Tensor, rate: float, lr: float) -> torch.Tensor:
    """The update that one step on these examples leaves."""
    return h.update_of({"name": "gradient-compression", "pruning_rate": rate}, network, x, y, optimizer={"lr": lr})


@pytest.mark.parametrize("rate", DROPPED)
def test_one_local_step_is_that_of_the_public_code(rate: float) -> None:
    """From a network whose parameters are sines."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.sin(torch.arange(1.0, p.numel() + 1) * (1 if p.ndim == 2 else 2)).view(p.shape))
    update = pruned(network, X, Y, rate, lr=0.5)
    assert (update == 0).nonzero().flatten().tolist() == DROPPED[rate]
    sent = [0.0 if i in DROPPED[rate] else g for i, g in enumerate(GRADIENT)]
    assert (update / -0.5).tolist() == pytest.approx(sent, abs=1e-6)


TIES = [[4.0, -1.0, 2.0, 2.0, -2.0, 3.0, 1.0, 0.0, 5.0, -2.0, 2.0], [2.0, -2.0, 2.0, 2.0], [-3.0], [0.0] * 7 + [1.0, -2.0, 3.0]]
TIES_DROPPED = {0.2: [[7], [], [], range(7)], 0.6: [[1, 6, 7], [], [], range(7)]}
TIES_DROPPED[0.9] = [[1, 2, 3, 4, 5, 6, 7, 9, 10], [], [], range(9)]
"""Positions in each of the four tensors that are zero when the public code has pruned them."""


@pytest.mark.parametrize("rate", TIES_DROPPED)
def test_ties_and_zeros_are_those_of_the_public_code(rate: float) -> None:
    sizes = [len(values) for values in TIES]
    update = pruned(h.Sums(*sizes), torch.cat([torch.tensor(values) for values in TIES])[None], torch.tensor([0]), rate, lr=1.0)
    parts = update.split(sizes)
    for part, values, dropped in zip(parts, TIES, TIES_DROPPED[rate], strict=True):
        assert part.tolist() == [0.0 if i in dropped else v for i, v in enumerate(values)]


@pytest.mark.parametrize(("rate", "lr", "most"), [(0.9, 0.1, 1), (0.9, 0.001, 12), (0.1, 0.001, 250)])
def test_only_rounding_tells_an_update_of_one_step_from_its_gradient(rate: float, lr: float, most: int) -> None:
    x, y = h.job_of(h.digits({"name": "fedavg"}, **SERVER)).context.clients.examples(0)
    x, y, network = x[:32], y[:32], build("mlp", (1, 8, 8), 10, seed=0)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(network(x), y), [*network.parameters()])
    update, parts = pruned(network, x, y, rate, lr), [g.flatten().abs() for g in gradients]
    kept = torch.cat([(part >= np.percentile(part.numpy(), 100 * rate)) & (part > 0) for part in parts])
    assert len(kept) == 55_210
    assert int((kept != (update != 0)).sum()) <= most


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.77, 0.99])
def test_quantile_is_numpys(share: float) -> None:
    values = torch.randn(37, generator=torch.Generator().manual_seed(0)).double()
    assert float(quantile(values, share)) == pytest.approx(float(np.quantile(values.numpy(), share)), rel=1e-12)


def test_small_entries_of_each_layer_do_not_leave() -> None:
    update = pruned(h.Sums(4, 2), torch.tensor([[0.1, -0.4, 0.2, 0.3, 5.0, -7.0]]), torch.tensor([0]), 0.5, lr=1.0)
    # magnitudes of the weight 0.1 0.2 0.3 0.4, median 0.25; of the bias 5 and 7, median 6
    assert update.tolist() == pytest.approx([0.0, -0.4, 0.0, 0.3, 0.0, -7.0], abs=1e-6)


def test_nothing_is_pruned_at_rate_0() -> None:
    plain, pruned = (
        h.trained(h.job_of(h.digits(m, **SERVER))).model
        for m in ({"name": "fedavg"}, {"name": "gradient-compression", "pruning_rate": 0.0})
    )
    assert torch.equal(plain, pruned)


def test_it_learns_and_nothing_is_proven() -> None:
    config = h.digits({"name": "gradient-compression"}, "training.optimizer.lr=0.5", rounds=6, **SERVER)
    assert h.trained(h.job_of(config)).history[-1]["test_accuracy"] > 0.7
    statement = certify_config(config)
    assert math.isinf(statement.own.proven.epsilon)
    assert "adds no noise" in statement.own.proven.reason
