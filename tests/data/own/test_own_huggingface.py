"""Hugging Face's data sets, by a small stand-in with the methods of `datasets.Dataset` that are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedveil as fv
from fedveil.errors import DataError, FedveilError

N = 24


class ClassLabel:
    names = ("no", "maybe", "yes")


class Split:
    """As `datasets.Dataset`: columns as lists, their types as `features`."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any] | None = None) -> None:
        self._columns = columns
        self.features = features or dict.fromkeys(columns)
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]


def split(n: int = N) -> Split:
    columns: dict[str, list[Any]] = {
        "image": [Image.fromarray(np.full((4, 4), i, np.uint8)) for i in range(n)],
        "tokens": [[i % 5, 1, 2] for i in range(n)],
        "age": [20 + i for i in range(n)],
        "ward": ["ab"[i % 2] for i in range(n)],
        "label": [i % 2 for i in range(n)],
        "person": [f"p{i % 6}" for i in range(n)],
    }
    return Split(columns, {**dict.fromkeys(columns), "label": ClassLabel()})


def test_whole_inputs_of_one_column_and_the_names_of_the_label() -> None:
    data = fv.from_huggingface(split(), features="image", client="person")
    assert (data.info.input_shape, data.info.classes, data.info.target.names) == ((1, 4, 4), 3, ClassLabel.names)
    assert data.origin.source == "a datasets.Dataset of Hugging Face"
    assert data.origin.counted == ()
    tokens = fv.from_huggingface(split(), features="tokens", vocabulary=5, test={"latest": "age", "since": 40})
    assert (tokens.x_test[:, 0].tolist(), tokens.info.vocabulary) == ([0, 1, 2, 3], 5)


def test_columns_as_a_table() -> None:
    data = fv.from_huggingface(split(), features=["age", "ward"], client="person", categories={"ward": ["a", "b"]})
    frame = {name: split()[name] for name in ("age", "ward", "label", "person")}
    wanted = fv.from_frame(frame, target="label", client="person", categories={"ward": ["a", "b"]}, classes=ClassLabel.names)
    assert np.array_equal(data.x_train, wanted.x_train)
    assert np.array_equal(data.users_train, wanted.users_train)
    assert data.info == wanted.info


@pytest.mark.parametrize("features", ["tokens", ["age"]], ids=str)
def test_a_dict_of_splits(features: Any) -> None:
    public = {"vocabulary": 5} if features == "tokens" else {}
    both = {"train": split(), "test": split(5)}
    data = fv.from_huggingface(both, features=features, client="person", **public)
    assert (len(data.x_train), len(data.x_test)) == (N, 5)
    assert data.origin.test == "test data of their own"
    own = fv.from_huggingface(both, features=features, client="person", test={"share": 0.25}, **public)
    assert (len(own.x_train), len(own.x_test)) == (18, 6)


@pytest.mark.parametrize(
    ("dataset", "features", "wanted"),
    [
        ({"validation": split()}, "image", "a DatasetDict without the split train has validation: give the one to train on"),
        (iter([]), "image", "list_iterator is not a datasets.Dataset in memory: load it without streaming"),
        (
            split(),
            "images",
            "there is no column 'images' (did you mean 'image'?); there are image, tokens, age, ward, label, person",
        ),
        (
            Split({"tokens": [[1], [1, 2]], "label": [0, 1]}),
            "tokens",
            "column 'tokens': examples differ in shape: pad, crop or resize them to one shape",
        ),
    ],
)
def test_refusals(dataset: Any, features: Any, wanted: str) -> None:
    with pytest.raises(FedveilError) as caught:
        fv.from_huggingface(dataset, features=features)
    assert str(caught.value) == wanted
    assert isinstance(caught.value, DataError)
