"""The page docs/releaser.md: its scikit-learn example runs, and learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedveil as fv

PAGE = (Path(__file__).parents[2] / "docs" / "releaser.md").read_text()


def test_the_scikit_learn_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"## scikit-learn\n\n```python\n(.*?)```", PAGE, re.S)
    assert len([line for line in program.splitlines() if line]) <= 15
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/releaser.md", "exec"), {})
    assert float(capsys.readouterr().out.removeprefix("accuracy ")) > 0.7
    assert all(fv.verification(tmp_path / f"site-{i}.ledger").exit_status == 0 for i in range(3))


def recipe(heading: str, **names: Any) -> dict[str, Any]:
    """Run the program under a heading, with these names; return all names after it."""
    (program,) = re.findall(rf"## {heading}\n\n```python\n(.*?)```", PAGE, re.S)
    exec(compile(program, "docs/releaser.md", "exec"), names)
    return names


TOTAL: dict[str, Any] = {"clip": 1.0, "epsilon": 1e6, "delta": 1e-5, "rounds": 3, "clients": 12}
"""Noise of about 0.001."""


def test_the_jax_recipe_moves_a_tree_of_parameters(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax", reason="needs jax, which is not among the packages of the tests")
    params = {"w": jax.numpy.zeros((3, 2)), "b": jax.numpy.zeros(2), "scale": jax.numpy.float32(1)}
    trained = jax.tree.map(lambda leaf: leaf + 0.1, params)
    release = fv.Releaser(**TOTAL, ledger=tmp_path / "ledger")
    after = recipe("JAX", jax=jax, np=np, params=params, trained=trained, release=release)["params"]
    for name, leaf in after.items():
        assert (leaf.shape, leaf.dtype) == (params[name].shape, params[name].dtype)
        assert np.allclose(leaf, trained[name], atol=0.02)


@pytest.mark.filterwarnings("default")  # of Keras
def test_the_keras_recipe_moves_all_weights_also_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("jax", reason="needs jax, which is not among the packages of the tests")
    keras = pytest.importorskip("keras", reason="needs keras, which is not among the packages of the tests")

    class Scale(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x: Any) -> Any:
            return x * self.scale

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Scale(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before, x = model.get_weights(), np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    release = fv.Releaser(**TOTAL, ledger=tmp_path / "ledger")
    recipe("Keras", np=np, model=model, x=x, y=x.sum(1, keepdims=True), release=release)
    assert () in [weight.shape for weight in before]
    assert all((after != start).any() for after, start in zip(model.get_weights(), before, strict=True))
    assert [np.shape(after) for after in model.get_weights()] == [np.shape(start) for start in before]
