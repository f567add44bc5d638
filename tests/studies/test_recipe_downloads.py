"""Rows whose data must be downloaded run once the files lie in the data directory: made-up files in the right format."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedveil.data.catalogue import CATALOGUE
from fedveil.data.sources import people
from fedveil.experiment.run import run
from fedveil.studies.reproduce.recipe import Recipe, RecipeRow, kept, rows
from fedveil.studies.reproduce.recipe_files import RowJob, job_of, load_recipe
from fedveil.studies.reproduce.recipe_list import recipe_names
from fedveil.studies.reproduce.reproduction import unavailable

RNG = np.random.default_rng(0)
FEW = ("training.rounds=1", "run.engine=inline", "training.local_steps=1", "training.evaluate_every=1", "run.seeded_noise=true")


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def cifar100(folder: Path) -> None:
    labels = np.arange(6000) % 100
    x_train, x_test = pixels(6000, 32, 32, 3), pixels(100, 32, 32, 3)
    np.savez(folder / "cifar100.npz", x_train=x_train, y_train=labels, x_test=x_test, y_test=labels[:100])


def tinyimagenet(folder: Path) -> None:
    """The folder of the archive, with one picture for each of 200 classes in each split."""
    root, classes = folder / "tiny-imagenet-200", [f"n{i:03}" for i in range(200)]
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(classes))
    said = []
    for i, name in enumerate(classes):
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64), (i, i, i)).save(buffer, "JPEG")
        (root / "train" / name / "images").mkdir(parents=True)
        for k in range(2):
            (root / "train" / name / "images" / f"{name}_{k}.JPEG").write_bytes(buffer.getvalue())
        (root / "val" / "images" / f"val_{i}.JPEG").write_bytes(buffer.getvalue())
        said.append(f"val_{i}.JPEG\t{name}\t0\t0\t63\t63")
    (root / "val" / "val_annotations.txt").write_text("\n".join(said))


def svhn(folder: Path) -> None:
    for split, n in (("train", 600), ("test", 100)):
        savemat(folder / f"{split}_32x32.mat", {"X": pixels(32, 32, 3, n), "y": 1 + np.arange(n)[:, None] % 10})


def harbox_folder(folder: Path) -> None:
    for person in range(1, 121):
        (folder / people.HARBOX_FOLDER / str(person)).mkdir(parents=True)
        for activity in ("Walk", "Call")[: 1 + person % 2]:
            windows = RNG.normal(size=(10, 1000))
            np.savetxt(folder / people.HARBOX_FOLDER / str(person) / f"{activity}_train.txt", windows.reshape(-1, 10), fmt="%.2f")


def femnist(folder: Path) -> None:
    """Twelve writers with a few of the 62 letters and digits each."""
    for split, n in (("train", 62), ("test", 5)):
        users = [f"w{i}" for i in range(12)]
        data = {user: {"x": (RNG.integers(0, 256, (n, 784)) / 255).tolist(), "y": list(range(n))} for user in users}
        (folder / "femnist" / split).mkdir(parents=True)
        text = json.dumps({"users": users, "num_samples": [n] * len(users), "user_data": data})
        (folder / "femnist" / split / "all.json").write_text(text)


MADE_UP: dict[str, tuple[Callable[[Path], None], dict[str, int]]] = {
    "cifar100": (cifar100, {"train_size": 6000, "test_size": 100}),
    "tinyimagenet": (tinyimagenet, {"train_size": 400, "test_size": 200}),
    "svhn": (svhn, {"train_size": 600, "test_size": 100}),
    "harbox": (harbox_folder, {}),
    "femnist": (femnist, {}),
}
"""By data set, what writes the files, and their size: copies that are not complete are refused, so the catalogue is told."""


def first_row(name: str, folder: Path) -> RowJob:
    """Some row of a recipe that needs this data set, with next to no training."""
    for recipe_name in recipe_names():
        recipe: Recipe = load_recipe(recipe_name)
        for row in rows(recipe):
            found = needs(recipe, row, name, folder)
            if found is not None:
                return found
    raise AssertionError(f"no row needs {name}")


def needs(recipe: Recipe, row: RecipeRow, name: str, folder: Path) -> RowJob | None:
    if row.missing or not kept(recipe, row, "small") or recipe.measure["name"] not in ("run", "labels-after", "generated"):
        return None
    own = ("data.partition.examples_per_client=20",) if name == "femnist" else ()
    job = job_of(recipe, row, "small", data_dir=folder, overrides=(*FEW, *own))
    return job if job.config.data.name == name else None


@pytest.mark.few(2)
@pytest.mark.heavy
@pytest.mark.parametrize("name", MADE_UP)
def test_a_row_runs_on_files_in_the_right_format(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, size = MADE_UP[name]
    monkeypatch.setitem(CATALOGUE, name, replace(CATALOGUE[name], **size))
    folder = tmp_path / "data"
    folder.mkdir()
    job = first_row(name, folder)
    assert name in unavailable([name], str(folder)), "without the files the row must be refused"
    write(folder)
    assert unavailable([name], str(folder)) == {}
    result = run(job.config, tmp_path / "run")
    assert 0 <= result.accuracy <= 1
