from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.attack_types import KnownTraining
from fedveil.attacks.matching import flat, gradient, prepared, simulation, split
from fedveil.errors import ConfigError


def _net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(5)] if norm else []
    return nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    return torch.randn((6, 4), generator=rng), torch.tensor([0, 1, 2, 0, 1, 2])


def _trained(net: nn.Module, x: Tensor, y: Tensor, local: KnownTraining, order: list[list[int]]) -> Tensor:
    """(w_0 - w_K) / (lr K) by torch's own optimizers."""
    before = flat([p.detach().clone() for p in net.parameters()])
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, local.lr, momentum=local.momentum, weight_decay=local.weight_decay),
        "adam": lambda p: torch.optim.Adam(p, local.lr),
    }
    optimizer = makers[local.optimizer](net.parameters())
    for indices, rate in zip(order, local.rates or [local.lr] * len(order), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(net(x[indices]), y[indices]).backward()
        if local.batch_clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), local.batch_clip)
        optimizer.step()
    return (before - flat([p.detach() for p in net.parameters()])) / (local.lr * local.steps)


CASES = [
    (KnownTraining(1, 0.3), [[0, 1, 2, 3, 4, 5]]),
    (KnownTraining(4, 0.3), [[0, 1, 2, 3, 4, 5]] * 4),
    (KnownTraining(3, 0.3, batch=4), [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]),
    (KnownTraining(2, 0.3, order=((5, 1), (0, 3, 2))), [[5, 1], [0, 3, 2]]),
    (KnownTraining(1, 0.01, optimizer="adam"), [[0, 1, 2, 3, 4, 5]]),
    (KnownTraining(3, 0.3, momentum=0.9, weight_decay=0.1), [[0, 1, 2, 3, 4, 5]] * 3),
    (KnownTraining(2, 0.3, rates=(0.5, 0.1), batch_clip=0.4), [[0, 1, 2, 3, 4, 5]] * 2),
    (KnownTraining(1, 0.3, batch_clip=0.2), [[0, 1, 2, 3, 4, 5]]),
    (KnownTraining(5, 0.01, batch=3, optimizer="adam"), [[0, 1, 2], [3, 4, 5]] * 2 + [[0, 1, 2]]),
]


@pytest.mark.parametrize(("local", "order"), CASES)
def test_unrolled_training_is_torch_training(local: KnownTraining, order: list[list[int]], batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    module = prepared(_net, _net().state_dict(), "eval", None)
    simulated = simulation(module, local)(x, y).detach()
    assert torch.allclose(simulated, _trained(_net().eval(), x, y, local, order), atol=2e-5)


def test_gradients_pass_through_unrolled_steps(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch[0].double(), batch[1]
    module = prepared(_net, _net().state_dict(), "eval", None).double()
    for local in (KnownTraining(3, 0.3), KnownTraining(3, 0.01, optimizer="adam")):
        simulate = simulation(module, local)
        assert torch.autograd.gradcheck(lambda z, s=simulate: s(z, y), (x.requires_grad_(True),), atol=1e-4)


def test_a_layer_with_two_names_is_loaded_and_unrolled(batch: tuple[Tensor, Tensor]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = self.again = nn.Linear(4, 4)
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.out(self.again(torch.tanh(self.inner(x))))
            return scores

    x, y = batch[0].flatten(1)[:, :4], batch[1]
    local, other = KnownTraining(3, 0.3), Twice()
    state = {name: p.detach() for name, p in other.named_parameters()}  # each once, as a layout has them
    simulated = simulation(prepared(Twice, state, "eval", None), local)(x, y).detach()
    assert torch.allclose(simulated, _trained(other, x, y, local, [[0, 1, 2, 3, 4, 5]] * 3), atol=2e-5)


def test_gradient_accepts_soft_labels(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    module = prepared(_net, _net().state_dict(), "eval", None)
    assert torch.allclose(gradient(module, x, y), gradient(module, x, F.one_hot(y, 3).float()), atol=1e-7)


def test_train_mode_normalises_by_the_batch_and_eval_by_the_buffers(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    state = _net(norm=True).state_dict()
    own = {"1.running_mean": torch.full((5,), 0.3), "1.running_var": torch.full((5,), 2.0)}
    reference = _net(norm=True).eval()
    reference[1].train()
    by_batch = flat(torch.autograd.grad(F.cross_entropy(reference(x), y), tuple(reference.parameters())))
    assert torch.allclose(gradient(prepared(lambda: _net(True), state, "train", None), x, y), by_batch, atol=1e-7)
    reference = _net(norm=True).eval()
    reference.load_state_dict(state | own)
    by_buffers = flat(torch.autograd.grad(F.cross_entropy(reference(x), y), tuple(reference.parameters())))
    assert torch.allclose(gradient(prepared(lambda: _net(True), state, "eval", own), x, y), by_buffers, atol=1e-7)
    assert not torch.allclose(by_batch, by_buffers, atol=1e-3)


def test_the_given_model_is_not_changed(batch: tuple[Tensor, Tensor]) -> None:
    shared = _net(norm=True)
    before = {k: v.clone() for k, v in shared.state_dict().items()}
    gradient(prepared(lambda: shared, before, "train", None), *batch)
    assert shared.training
    assert all(torch.equal(v, before[k]) for k, v in shared.state_dict().items())


def test_states_that_do_not_fit_are_refused() -> None:
    state = _net().state_dict()
    with pytest.raises(ConfigError, match=r"0\.weight"):
        prepared(_net, {k: v for k, v in state.items() if k != "0.weight"}, "eval", None)
    with pytest.raises(ConfigError, match="extra"):
        prepared(_net, state | {"extra": torch.zeros(1)}, "eval", None)


def test_split_and_flat_are_inverse() -> None:
    named = dict(_net().named_parameters())
    vector = flat(list(named.values()))
    assert all(torch.equal(part, named[k]) for k, part in split(vector, named).items())
