"""One public batch before training: what a model makes must be what the task needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.federation.evidence import evidence
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


def test_a_module_that_writes_into_a_buffer_is_told_that_it_is_dropped() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            self.last.mul_(0.9).add_(out.detach().mean(0))
            return out - self.last

    assert "Remembering writes last in its forward pass" in " ".join(check(Remembering()))


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
    torch.manual_seed(0)  # its power iteration is not done at the start
    (remark,) = check(nn.Sequential(norm(nn.Linear(3, 4))))
    assert re.search(r"writes 0\..*u, 0.*v in its forward pass.*parametrizations\.weight_norm", remark)
    assert check(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))) == []


# --- the initial model stays as it is ---------------------------------------------------------------------------------


def test_rows_that_public_examples_look_up_keep_their_norm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(12, 5, max_norm=0.5), nn.Flatten(), nn.Linear(15, 4))
    x, test, y = torch.randint(6, 12, (24, 3)), torch.randint(0, 4, (8, 3)), torch.arange(24) % 4
    data = fv.from_arrays(
        *(x.numpy(), y.numpy()), client=np.arange(24) % 2, test=(test.numpy(), y[:8].numpy()), classes=4, vocabulary=12
    )
    config = fv.configure(
        model=net, method=fv.DPFedAvg(clip=1.0), training={"rounds": 1}, privacy={"noise_multiplier": 1e-9, "delta": 1e-3}
    )
    after = fv.train(config, tmp_path / "run", data=data).model.module
    table, before = after.get_submodule("0"), net[0]
    assert isinstance(table, nn.Embedding)
    assert isinstance(before, nn.Embedding)
    assert torch.allclose(table.weight[:6], before.weight[:6], atol=1e-6)  # of words that no client has
    assert not torch.allclose(table.weight[6:], before.weight[6:], atol=1e-3)


class Normalising(nn.Module):
    """Brings its weight to norm 1 in each pass, and counts in an attribute."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(3, 4), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.layer.weight)
        out: Tensor = self.layer(x)
        return out


def in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.div_(weight.norm())


def behind_the_versions(weight: Tensor) -> None:
    weight.data.div_(weight.data.norm())


def by_another_tensor(weight: Tensor) -> None:
    weight.data = weight.data / weight.data.norm()


@pytest.mark.parametrize("write", [in_place, behind_the_versions])
def test_parameters_that_each_pass_writes_are_put_back(write: Any) -> None:
    model = FlatModel(Normalising(write))
    before = model.vector.clone()
    check_output(model, X, Y, Classification())
    assert torch.equal(model.vector, before)
    model.vector.zero_()
    assert not any(p.any() for p in model.module.parameters())  # and are the model's vector still


def test_other_data_for_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"replaces the data of its parameters .*layer\.weight.*copy_"):
        check(Normalising(by_another_tensor))


class SetOnce(nn.Module):
    """Scales its output by a number that the first examples set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.ready = nn.Linear(3, 4), nn.Parameter(torch.ones(4)), False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if not self.ready:
            self.ready = True
            self.scale.data.copy_(1 / out.detach().std(0))
        return out * self.scale


def test_what_the_first_examples_set_is_refused_unless_it_is_set_before() -> None:
    with pytest.raises(ConfigError, match=r"SetOnce sets scale in its first pass.*run it once on public examples"):
        check(SetOnce())
    module = SetOnce()
    module(X)
    check(module)


def test_examples_stay_as_they_are() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.mul_(2))
            return out

    model, x = FlatModel(Writing()), X.clone()
    check_output(model, x, Y, Classification())
    one, other = (evidence(Classification(), model, x, Y)[0] for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(x, X)


# --- gradients that cannot be computed --------------------------------------------------------------------------------


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.body, self.first(x), use_reentrant=True)  # the line
        out: Tensor = self.out(hidden)
        return out


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(x))  # the line
        hidden += 1
        out: Tensor = self.out(hidden)
        return out


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        return slope / torch.ones(7)


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Wrong.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return out


def line_of(text: str, after: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {after}("))
    return 1 + next(i for i, line in enumerate(lines) if i > start and text in line)


@pytest.mark.parametrize(
    ("make", "line", "remedy"),
    [
        (Reentrant, line_of("# the line", "Reentrant"), "use_reentrant=False"),
        (Overwriting, line_of("# the line", "Overwriting"), "changed in place after it was computed"),
        (WithoutGradient, line_of("torch.ones(7)", "Wrong"), "needs a gradient"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_failing_gradient_names_the_line_and_the_remedy(make: type[nn.Module], line: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"the gradients of {make.__name__} \(at .*{Path(__file__).name}:{line}\).*{remedy}"):
        check(make())


def test_a_failing_gradient_of_layers_of_torch_names_the_operation() -> None:
    with pytest.raises(ConfigError, match=r"gradients of Sequential \(at its operation Sigmoid\).*changed in place after"):
        check(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(3, 4)))


def test_a_failing_forward_pass_names_the_line() -> None:
    line = line_of("check(Making(lambda out: out @ torch." + "ones(5, 5)))", "Overwriting")
    with pytest.raises(ConfigError, match=rf"cannot take examples .*\(at .*{Path(__file__).name}:{line}\)"):
        check(Making(lambda out: out @ torch.ones(5, 5)))
