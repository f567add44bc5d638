"""Data sets of torch: TensorDataset, Subset, pictures, tokens, a client in each item; what has no length is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import fedveil as fv
from fedveil.errors import DataError

N = 24
X = torch.arange(N * 2, dtype=torch.float32).reshape(N, 2)
Y = torch.arange(N) % 3
WHO = torch.arange(N) % 6


class Listed(Dataset[Any]):
    """Items from a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def test_a_tensor_dataset_and_a_subset_of_it() -> None:
    data = fv.from_torch(TensorDataset(X, Y), client=WHO.tolist(), test={"share": 0.25})
    assert (len(data.x_train), len(data.x_test), data.info.classes, data.info.users) == (18, 6, 3, 6)
    assert data.origin.source == "torch: TensorDataset"
    assert data.origin.casts == ()
    half = fv.from_torch(Subset(TensorDataset(X, Y), range(1, N, 2)), client=WHO[1::2].tolist(), test={"share": 0.25})
    assert sorted([*half.x_train[:, 0], *half.x_test[:, 0]]) == X[1::2, 0].tolist()


def test_the_client_in_each_item() -> None:
    data = fv.from_torch(TensorDataset(X, Y, WHO), client=2, test={"share": 0.25})
    other = fv.from_torch(TensorDataset(X, Y), client=WHO.tolist(), test={"share": 0.25})
    assert np.array_equal(data.x_test, other.x_test)
    assert np.array_equal(data.users_train, other.users_train)


def test_another_dataset_for_testing() -> None:
    data = fv.from_torch(TensorDataset(X, Y), client=WHO.tolist(), test=TensorDataset(X[:4], Y[:4]))
    assert np.array_equal(data.x_test, X[:4].numpy())
    assert data.origin.test == "test data of their own"


def test_pictures_and_tokens() -> None:
    colour = np.random.default_rng(0).integers(0, 256, (N, 8, 6, 3), dtype=np.uint8)
    data = fv.from_torch(Listed([(Image.fromarray(one), i % 2) for i, one in enumerate(colour)]), test=0.25)
    assert (data.info.input_shape, data.x_train.dtype, data.info.scale) == ((3, 8, 6), np.uint8, 255.0)
    known = {one.tobytes() for one in colour.transpose(0, 3, 1, 2)}
    assert {one.tobytes() for one in (*data.x_train, *data.x_test)} == known
    grey = fv.from_torch(Listed([(Image.fromarray(one[..., 0]), i % 2) for i, one in enumerate(colour)]), test=0.25)
    assert grey.info.input_shape == (1, 8, 6)
    tokens = fv.from_torch(TensorDataset(X.long() % 7, X.long() % 7), vocabulary=7, classes=7, test=0.25)
    assert (tokens.x_train.dtype, tokens.info.target.shape) == (np.int64, (2,))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("dataset", "client", "wanted"),
    [
        (
            Endless(),
            None,
            "Endless has no length, or is empty: give a map-style dataset, such as TensorDataset, with at least one example",
        ),
        (
            Listed([]),
            None,
            "Listed has no length, or is empty: give a map-style dataset, such as TensorDataset, with at least one example",
        ),
        (Listed([{"x": 1}]), None, "the items of the Listed are not all (input, target): give a dataset whose items are"),
        (
            Listed([{"ids": X[0], "mask": X[0], "labels": 1}] * 3),
            None,
            "the items of the Listed are dicts with ids, mask, labels: make pairs (input, target) of them, such as "
            "[(item['ids'], item['labels']) for item in dataset]",
        ),
        (
            DataLoader(TensorDataset(X, Y), 2),
            None,
            "a DataLoader hands out batches, not examples: give its data set, as loader.dataset is",
        ),
        (
            [TensorDataset(X, Y), TensorDataset(X, Y)],
            None,
            "a list of 2 data sets is not one data set: join them, and say whose each example is: from_torch(torch.utils.data."
            "ConcatDataset(sets), client=np.repeat(range(len(sets)), [len(one) for one in sets]))",
        ),
        (
            {"a": DataLoader(TensorDataset(X, Y), 2)},
            None,
            "a dict of 1 data sets is not one data set: join them, and say whose each example is: from_torch(torch.utils.data."
            "ConcatDataset(list(sets.values())), client=np.repeat(list(sets), [len(one) for one in sets.values()])), where sets "
            "are the loaders' .dataset",
        ),
        (TensorDataset(X), None, "the items of the TensorDataset are not all (input, target): give a dataset whose items are"),
        (
            Listed([(torch.zeros(2), 0), (torch.zeros(3), 1)]),
            None,
            "part 0 of the items: examples differ in shape: pad, crop or resize them to one shape",
        ),
        (
            Listed([(np.zeros((1, 4, 4), np.uint8), 0), (np.zeros((1, 4, 4), np.uint16), 1)]),
            None,
            "part 0 of the items: examples differ in type: give all of them the same, such as bytes or float32",
        ),
        (TensorDataset(X, Y), 2, "client = 2: the items of the dataset have 2 parts: give 2 or more, or an array of ids"),
    ],
)
def test_refusals(dataset: Any, client: Any, wanted: str) -> None:
    with pytest.raises(DataError) as caught:
        fv.from_torch(dataset, client=client)
    assert str(caught.value) == wanted


def test_a_third_part_that_nobody_asked_for_is_refused() -> None:
    """It may be whose example each is: dropped, the run would protect examples and not people."""
    x, y, c = torch.zeros(8, 3), torch.arange(8) % 2, torch.arange(8) // 2
    with pytest.raises(DataError, match=r"have 3 parts, and \(input, target\) would be read: give client=2"):
        fv.from_torch(TensorDataset(x, y, c))
    with pytest.raises(DataError, match=r"have 4 parts, and \(input, target, client\) would be read"):
        fv.from_torch(TensorDataset(x, y, c, c), client=2)
    assert fv.from_torch(TensorDataset(x, y, c), client=2).users_train is not None


class Units(torch.Tensor):
    """A subclass that means more than its numbers."""


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda x: x.as_subclass(Units), "is a Units, a subclass of Tensor"),
        (lambda x: x.to_sparse(), "is no plain dense tensor"),
        (lambda x: x.to(torch.complex64).conj(), "is no plain dense tensor"),
        (lambda x: np.ma.masked_array(x.numpy(), mask=x.numpy() > 0), "x has masked values"),
    ],
)
def test_tensors_that_mean_more_than_their_numbers_are_refused(odd: Any, words: str) -> None:
    x = torch.arange(20.0).reshape(10, 2)
    y = torch.arange(10) % 2
    with pytest.raises(DataError, match=words) as error:
        fv.from_arrays(odd(x), y)
    assert "\n" not in str(error.value)
    if not isinstance(odd(x), np.ndarray):
        with pytest.raises(DataError, match=words.removeprefix("x ")):
            fv.from_torch([(odd(x[[i]]), int(y[i])) for i in range(10)])
    assert fv.from_arrays(torch.nn.Parameter(x), y).x_train.shape[1:] == (2,)
