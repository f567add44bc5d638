"""Names, sizes and refusals: everything that must hold before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import BaseModel, ValidationError

from fedveil.errors import ConfigError
from fedveil.models import model_registry as registry

MNIST, CIFAR, HAR, DIGITS = (1, 28, 28), (3, 32, 32), (9, 128), (1, 8, 8)

# name, input, classes, options, parameters: the arithmetic of each line is written out in docs/models.md
COUNTS = [
    ("linear", MNIST, 10, {}, 784 * 10 + 10),
    ("mlp", MNIST, 10, {}, 199_210),
    ("mlp", DIGITS, 10, {"hidden": (32,)}, 64 * 32 + 32 + 32 * 10 + 10),
    ("mlp", (561,), 6, {"hidden": ()}, 561 * 6 + 6),
    ("lenet5", MNIST, 10, {}, 61_706),
    ("lenet5", MNIST, 10, {"padding": 2}, 61_706),
    ("lenet5", MNIST, 10, {"padding": 0}, 44_426),
    ("lenet5", (1, 32, 32), 10, {}, 61_706),
    ("lenet5", CIFAR, 10, {}, 62_006),
    ("lenet-dlg", MNIST, 10, {}, 13_426),
    ("cnn2", MNIST, 10, {}, (25 * 16 + 16) + (16 * 25 * 32 + 32) + (32 * 49 * 128 + 128) + (128 * 10 + 10)),
    ("cnn2", MNIST, 10, {"channels": (32, 64), "hidden": 512}, 1_663_370),
    (
        "cnn3",
        CIFAR,
        10,
        {},
        (27 * 32 + 32) + (9 * 32 * 64 + 64) + (9 * 64 * 64 + 64) + (1024 * 128 + 128) + (128 * 64 + 64) + 650,
    ),
    ("resnet18", CIFAR, 10, {}, 11_173_962),
    ("resnet18", CIFAR, 10, {"norm": "batch"}, 11_173_962),
    ("resnet18", CIFAR, 100, {}, 11_220_132),
    ("resnet34", CIFAR, 10, {}, 21_282_122),
    ("resnet152", CIFAR, 10, {}, 58_156_618),
    ("vit-small", CIFAR, 10, {}, 21_341_578),
    ("vit-small", MNIST, 10, {"depth": 1}, (16 + 1 + 49) * 384 + 1_774_464 + 2 * 384 + 385 * 10),
    (
        "cnn-lstm",
        HAR,
        6,
        {},
        (9 * 5 * 32 + 32) + (32 * 5 * 64 + 64) + (4 * 64 * (64 + 64) + 2 * 4 * 64) + (64 * 6 + 6),
    ),
]


@pytest.mark.parametrize(("name", "shape", "classes", "options", "count"), COUNTS)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, options: dict[str, object], count: int) -> None:
    assert registry.size(name, shape, classes, **options) == count


@pytest.mark.heavy
def test_the_registry_answers_without_torch() -> None:
    program = (
        "import sys; from fedveil.models import model_registry as r; r.shapes('resnet18', (3, 32, 32), 10, norm='batch'); "
        "r.names(); r.options_model('mlp'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_name_has_a_line_and_frozen_options() -> None:
    assert registry.names() == list(registry.MODELS)
    for name, entry in registry.MODELS.items():
        options = registry.options_model(name)
        assert issubclass(options, BaseModel)
        assert entry.summary
        with pytest.raises(ValidationError, match="extra"):
            options.model_validate({"surely_not_an_option": 1})


@pytest.mark.parametrize("name", registry.names())
def test_parameter_names_are_unique_and_shapes_positive(name: str) -> None:
    shapes = registry.shapes(name, HAR if name == "cnn-lstm" else CIFAR, 10)
    assert all(side > 0 for shape in shapes.values() for side in shape)
    assert list(shapes)[-1].endswith(".bias")
    assert shapes[list(shapes)[-1]] == (10,)


@pytest.mark.parametrize("name", [n for n in registry.names() if n not in ("lenet5", "cnn-lstm")])
def test_digits_fit(name: str) -> None:
    assert registry.size(name, DIGITS, 10) > 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: registry.shapes("lenet", MNIST, 10), ["'lenet'", "did you mean 'lenet5'", "cnn-lstm"]),
        (lambda: registry.shapes("mlp", MNIST, 10, hiden=(3,)), ["'hiden'", "did you mean 'hidden'", "activation"]),
        (lambda: registry.shapes("linear", MNIST, 10, norm="batch"), ["linear", "'norm'", "it takes start"]),
        (lambda: registry.shapes("resnet18", CIFAR, 10, norm="layer"), ["norm", "'layer'", "'group' or 'batch'"]),
        (lambda: registry.shapes("resnet18", CIFAR, 10, groups=7), ["7 groups", "64 channels"]),
        (lambda: registry.shapes("lenet5", MNIST, 10, padding=1), ["padding = 1", "0 or 2"]),
        (lambda: registry.shapes("mlp", MNIST, 10, hidden=(0,)), ["hidden", "greater than 0"]),
        (lambda: registry.shapes("mlp", MNIST, 10, hidden=("3",)), ["hidden", "integer"]),
        (lambda: registry.shapes("lenet5", DIGITS, 10), ["(1, 8, 8)", "conv2", "models that can", "cnn2"]),
        (lambda: registry.shapes("vit-small", CIFAR, 10, heads=7), ["7 heads", "384 channels"]),
        (lambda: registry.shapes("vit-small", (1, 3, 3), 10), ["patches", "models that can"]),
        (lambda: registry.shapes("cnn2", (561,), 6), ["(561,)", "models that can: linear, mlp"]),
        (lambda: registry.shapes("cnn-lstm", MNIST, 10), ["(channels, length)"]),
        (lambda: registry.shapes("mlp", (0,), 10), ["(0,)", "positive"]),
        (lambda: registry.shapes("mlp", (), 10), ["()", "positive"]),
        (lambda: registry.shapes("mlp", MNIST, 0), ["classes is 0", "at least 1"]),
        (lambda: registry.build("mlp", MNIST, 10, -1), ["seed is -1"]),
        (lambda: registry.build("mlp", MNIST, 10, True), ["seed is True"]),
    ],
)
def test_refusals_say_what_is_allowed(call: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        call()  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)


def test_suggested_models_really_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        registry.shapes("lenet5", DIGITS, 10)
    for name in str(caught.value).split("models that can: ")[1].split(", "):
        assert registry.shapes(name, DIGITS, 10)
