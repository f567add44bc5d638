"""One public batch before training: what a model makes must be what the task needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedveil.errors import ConfigError
from fedveil.models.probe import check_output
from fedveil.tasks.classification import Classification
from fedveil.tasks.regression import Regression
from fedveil.training.params import FlatModel

X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])


class Making(nn.Module):
    """Passes the output of a linear layer through a function."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(3, 4), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.layer(x))


def check(module: nn.Module, task: Any = None, y: Tensor = Y) -> list[str]:
    return check_output(FlatModel(module), X, y, task or Classification())


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (lambda out: (out, out.sum()), r"makes a tuple of float32 \[4, 4\], float32 \[\] of examples float32 \[4, 3\]"),
        (lambda out: {"logits": out}, r"makes a dict of logits: float32 \[4, 4\] .* it must return one floating-point tensor"),
        (lambda out: None, "makes a NoneType"),
        (lambda out: out.argmax(1), r"makes int64 \[4\]"),
        (lambda out: out.sum(0), r"the network gives \[4\] of float32"),
        (lambda out: out[:2], r"makes float32 \[2, 4\].*a row for each example"),
        (lambda out: out.detach(), "has no gradient: it must not be computed under torch.no_grad"),
        (
            lambda out: out[:, :2],
            r"gives \[4, 2\] of float32 and targets are \[4\] of int64; it needs \[n, C\], a score for each class",
        ),
        (lambda out: out.reshape(4, 2, 2), r"gives \[4, 2, 2\].*it needs \[n, C\]"),
        (
            lambda out: out.reshape(4, 4),
            r"cannot take examples float32 \[3, 3\]: RuntimeError: .*it takes 4 at once, and has to take any number",
        ),
        (lambda out: out.log(), "the output of Making is NaN or infinite on examples of the test set, before any training"),
        (lambda out: out @ torch.ones(3), r"cannot take examples float32 \[4, 3\]: RuntimeError: "),
    ],
)
def test_refused_with_the_shapes(then: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(Making(then))


def test_accepted() -> None:
    check(Making(lambda out: out))
    check(Making(lambda out: out[:, 0]), Regression(), torch.randn(4))
    check(Making(lambda out: out[:, :1]), Regression(), torch.randn(4))


def test_regression_of_another_width() -> None:
    wanted = r"'regression' fails .*gives \[4, 4\].*it needs \[n, k\], one number for each.*set the width of its last layer to 1"
    with pytest.raises(ConfigError, match=wanted):
        check(Making(lambda out: out), Regression(), torch.randn(4))


def test_what_is_trained_must_decide_the_output() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    (remark,) = check(Half())
    assert "unused.weight, unused.bias does not decide the output of Half" in remark
    half = Half()
    half.used.weight.requires_grad_(False)
    half.used.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"the output of Half has no gradient|no trained parameter of Half"):
        check(half)


def test_the_model_stays_as_it_is() -> None:
    model = FlatModel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()))
    before, state = {k: v.clone() for k, v in model.module.state_dict().items()}, torch.get_rng_state()
    check_output(model, X, Y, Classification())
    after = model.module.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items() if not k.endswith("num_batches_tracked"))
    assert not model.grad.any()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_that_remembers_is_found() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            self.last.mul_(0.9).add_(out.detach().mean(0))
            return out - self.last

    with pytest.raises(ConfigError, match="changes buffers or frozen parameters"):
        check(Remembering())


def test_a_cache_that_public_examples_fill_may_stay() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.places = nn.Linear(3, 4), None

        def forward(self, x: Tensor) -> Tensor:
            if self.places is None:
                self.places = torch.arange(4.0)
            out: Tensor = self.layer(x) + self.places
            return out

    check(Cached())


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated")
def test_spectral_norm_has_a_remedy(norm: Any) -> None:
    words = r"changes buffers or frozen parameters in its forward pass \(0\..*u, 0.*v\).*parametrizations\.weight_norm instead"
    with pytest.raises(ConfigError, match=words):
        check(nn.Sequential(norm(nn.Linear(3, 4))))
    check(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))))
