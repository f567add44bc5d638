"""A model as one flat vector: what is trained lies in it, what is frozen is shared, constant and in evaluation mode."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from fedveil.errors import ConfigError
from fedveil.training.params import FlatModel, batch_statistics, training_mode


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, with a positional encoding and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.linspace(-1, 1, 20).reshape(5, 4))
        self.register_buffer("counter", torch.tensor(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((self.embedding(x) + self.positions).mean(1))
        return out


def backbone_and_head() -> nn.Sequential:
    backbone = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Flatten())
    backbone.requires_grad_(False)
    return nn.Sequential(backbone, nn.Linear(4, 3), nn.Dropout(0.1))


def test_tied_parameters_are_one_layer_and_stay_tied() -> None:
    model = FlatModel(Tied())
    assert model.layout.names == ("embedding.weight", "head.bias")
    model.load(torch.arange(35.0))
    for other in (
        model,
        model.copy_into(torch.zeros(35), torch.zeros(35)),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ):
        assert other.module.head.weight is other.module.embedding.weight
        assert torch.equal(other.vector, torch.arange(35.0))
        other.vector[0] = -5.0
        assert other.module.head.weight[0, 0] == -5.0
        other.load(torch.arange(35.0))


def test_both_uses_of_a_tied_parameter_add_to_its_gradient() -> None:
    model, x = FlatModel(Tied()), torch.tensor([[0, 1, 2, 3, 4]])
    model.module(x).sum().backward()
    loose = Tied()
    loose.head.weight = nn.Parameter(loose.embedding.weight.detach().clone())
    loose.load_state_dict({**model.module.state_dict()})
    loose(x).sum().backward()
    assert torch.allclose(model.grad[:28].view(7, 4), loose.embedding.weight.grad + loose.head.weight.grad)


def test_constant_buffers_are_no_statistics() -> None:
    model = FlatModel(Tied())
    assert model.buffers().numel() == 0
    assert batch_statistics(FlatModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).module).keys() == {
        "1.running_mean",
        "1.running_var",
    }


def test_only_what_requires_a_gradient_is_in_the_vector() -> None:
    model = FlatModel(backbone_and_head())
    assert model.layout.names == ("1.weight", "1.bias")
    before = {name: value.clone() for name, value in model.module[0].state_dict().items()}
    model.module(torch.randn(8, 2, 3)).sum().backward()
    assert model.grad.abs().sum() > 0
    assert all(torch.equal(value, before[name]) for name, value in model.module[0].state_dict().items())
    assert model.buffers().numel() == 0, "a frozen layer keeps its statistics"


def test_frozen_parts_run_in_evaluation_mode_always() -> None:
    model = FlatModel(backbone_and_head())
    for _ in range(2):
        assert [part.training for part in model.module] == [False, True, True]
        assert not any(part.training for part in model.module[0])
        model.eval(own_statistics=True)
        assert not any(part.training for part in model.module.modules())
        model.train()


def test_normalisation_without_parameters_is_frozen_with_what_it_is_in() -> None:
    """In a client's own test it kept what the test wrote, and all clients after it failed."""
    frozen = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)).requires_grad_(False)
    model = FlatModel(nn.Sequential(frozen, nn.Linear(4, 2)))
    model.eval(own_statistics=True)
    assert not any(part.training for part in model.module.modules())
    model.module(torch.randn(5, 3))
    model.train()
    assert model.buffers().numel() == 0


def test_how_many_batches_a_client_had_is_not_handed_on() -> None:
    model = FlatModel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    statistics = model.buffers()
    model.module(torch.randn(5, 3))
    assert int(model.module[1].num_batches_tracked) == 1
    model.load_buffers(statistics)
    assert int(model.module[1].num_batches_tracked) == 0


def test_a_test_uses_the_statistics_of_its_batch_and_no_dropout() -> None:
    model = FlatModel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
    model.eval(own_statistics=True)
    assert [part.training for part in model.module] == [False, True, False]
    model.eval()
    assert not any(part.training for part in model.module)


def test_copies_share_what_is_frozen() -> None:
    model = FlatModel(backbone_and_head())
    d = model.layout.dimension
    other = model.copy_into(torch.zeros(d), torch.zeros(d))
    for one, two in zip(model.module[0].state_dict().values(), other.module[0].state_dict().values(), strict=True):
        assert one.data_ptr() == two.data_ptr()
    assert other.vector.data_ptr() != model.vector.data_ptr()
    assert torch.equal(other.vector, model.vector)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.ReLU()), "nothing to train"),
        (nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
        (nn.Linear(2, 2).double(), "float32"),
    ],
)
def test_nothing_to_train(module: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FlatModel(module)


def test_training_mode_of_a_module_without_parameters() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    assert all(part.training for part in training_mode(module.eval()).modules())


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def test_a_model_that_is_sent_to_another_process_keeps_the_hooks_of_its_parameters() -> None:
    module = torch.nn.Linear(2, 2)
    module.weight.register_hook(halved)
    model = FlatModel(module)
    for one in (model, pickle.loads(pickle.dumps(model)), model.copy_into(torch.zeros(6), torch.zeros(6))):
        one.grad.zero_()
        one.module(torch.ones(1, 2)).sum().backward()
        assert one.grad.tolist() == [0.5] * 4 + [1.0] * 2
