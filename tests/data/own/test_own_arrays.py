"""Arrays: every cast by name, and every refusal in its exact words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

import fedveil as fv
from fedveil.data.catalogue import IGNORED
from fedveil.data.dataset import Dataset
from fedveil.errors import ConfigError, DataError, FedveilError

N = 40
X = np.linspace(-1, 1, N * 3, dtype=np.float32).reshape(N, 3)
Y = np.arange(N) % 2
WHO = np.arange(N) % 10


def own(x: Any = X, y: Any = Y, **more: Any) -> Dataset:
    return fv.from_arrays(x, y, **{"client": WHO, **more})  # type: ignore[no-any-return]


def casts(data: Dataset) -> tuple[str, ...]:
    assert data.origin is not None
    return data.origin.casts


def test_nothing_is_cast_that_need_not_be() -> None:
    data = own(y=Y.astype(np.int64), classes=2)
    assert casts(data) == ()
    assert data.info.input_shape == (3,)
    assert (data.info.mean, data.info.std, data.info.scale) == ((0.0,) * 3, (1.0,) * 3, 1.0)
    assert data.origin is not None
    assert data.origin.counted == ()
    assert sorted([*data.x_train.ravel(), *data.x_test.ravel()]) == X.ravel().tolist()


@pytest.mark.parametrize(
    ("x", "wanted", "dtype"),
    [
        (X.astype(np.float64), ("examples float64 -> float32",), "float32"),
        (X.astype(np.float16), ("examples float16 -> float32",), "float32"),
        ((X > 0), ("examples bool -> float32",), "float32"),
        (np.arange(N * 3, dtype=np.int32).reshape(N, 3), ("examples int32 -> float32",), "float32"),
        (X[:, 0], ("examples () -> (1,): one feature",), "float32"),
        (np.zeros((N, 8, 8), np.uint8), ("examples (8, 8) -> (1, 8, 8): one channel",), "uint8"),
        (np.zeros((N, 3, 8, 8), np.uint8), (), "uint8"),
        (torch.zeros(N, 3, dtype=torch.bfloat16, requires_grad=True), (), "float32"),
        (X.tolist(), ("examples float64 -> float32",), "float32"),
    ],
    ids=str,
)
def test_casts_of_inputs(x: Any, wanted: tuple[str, ...], dtype: str) -> None:
    data = own(x, Y.astype(np.int64))
    assert casts(data) == wanted
    assert data.x_train.dtype == data.x_test.dtype == dtype


@pytest.mark.parametrize(
    ("y", "wanted", "dtype", "classes"),
    [
        (Y.astype(np.int32), ("labels int32 -> int64",), "int64", 2),
        (Y.astype(np.uint8), ("labels uint8 -> int64",), "int64", 2),
        (Y.astype(bool), ("labels bool -> int64",), "int64", 2),
        (Y.astype(np.float64), ("targets float64 -> float32",), "float32", 0),
        (Y.astype(np.float32), (), "float32", 0),
        (torch.arange(N) % 4, (), "int64", 4),
    ],
    ids=str,
)
def test_casts_of_targets(y: Any, wanted: tuple[str, ...], dtype: str, classes: int) -> None:
    data = own(y=y)
    assert (casts(data), str(data.y_train.dtype), data.info.classes) == (wanted, dtype, classes)
    assert data.info.target.dtype == dtype


def test_the_number_of_classes_that_is_counted_is_named_as_such() -> None:
    assert own().origin.counted == ("number of classes",)  # type: ignore[union-attr]
    assert own(y=Y.astype(bool)).origin.counted == ()  # type: ignore[union-attr]
    assert "counted in the data, treated as public: number of classes" in repr(own())


def test_quantities_that_are_integers_are_quantities_where_that_is_said() -> None:
    data = own(y=Y * 7 - 3, classes=0, unit="EUR")
    assert data.info.classes == 0
    assert data.info.target.unit == "EUR"
    assert casts(data) == ("targets int64 -> float32",)


@pytest.mark.parametrize("y", [np.where(Y == 1, 1, -1), np.where(Y == 1, 1.0, -1.0), np.where(Y == 1, "1", "-1")], ids=str)
def test_labels_become_their_place_in_the_public_list(y: Any) -> None:
    data = own(y=y, classes=[-1, 1], test={"share": 0.2})
    assert sorted(data.y_train.tolist()) == [0] * 15 + [1] * 15
    assert data.info.target.names == ("-1", "1")
    assert casts(data) == ("labels -> their place in classes",)


def test_numbers_from_0_go_with_a_list_of_names() -> None:
    data = own(classes=["no", "yes"])
    assert data.info.target.names == ("no", "yes")
    assert set(data.y_train.tolist()) == {0, 1}
    assert casts(own(y=Y.astype(np.float64), classes=["no", "yes"])) == ("labels -> their place in classes",)


def test_numbers_in_the_list_have_their_places_there() -> None:
    stars, names = [1 + i % 3 for i in range(N)], ["1", "2", "3", "none"]
    one, other = own(y=stars, classes=names), own(y=["none", *stars[1:]], classes=names)
    assert set(one.y_train.tolist()) == {0, 1, 2}
    assert max((one.y_train != other.y_train).sum(), (one.y_test != other.y_test).sum()) <= 1
    assert own(y=Y.astype(bool), classes=["True", "False"]).y_train.tolist() == own(y=Y, classes=[1, 0]).y_train.tolist()


def test_one_number_among_truths_moves_no_other_label() -> None:
    """It makes numbers of a whole list."""
    truths = Y.astype(bool).tolist()
    one = own(y=truths, classes=["True", "False"])
    with pytest.raises(DataError, match="that classes does not list"):
        own(y=[*truths[:-1], 1], classes=["True", "False"])
    plain = own(y=[*truths[:-1], int(truths[-1])], classes=["False", "True"])
    assert plain.y_train.tolist() == (1 - one.y_train).tolist()


def test_a_listed_class_that_nobody_has_is_still_one() -> None:
    assert own(classes=5).info.classes == 5
    assert own(y=np.where(Y == 1, "b", "a"), classes=["a", "b", "c"]).info.classes == 3


def test_tokens_and_targets_of_many_places() -> None:
    tokens = np.arange(N * 4, dtype=np.int32).reshape(N, 4) % 7
    data = own(tokens, np.where(tokens == 0, IGNORED, tokens), vocabulary=7, classes=7)
    assert (data.x_train.dtype, data.y_train.dtype) == (np.int64, np.int64)
    assert casts(data) == ("tokens int32 -> int64", "labels int32 -> int64")
    assert (data.info.vocabulary, data.info.target.shape, data.info.classes) == (7, (4,), 7)
    assert np.array_equal(data.standardise(data.x_train), data.x_train)
    several = own(y=np.stack([Y, 1 - Y], 1).astype(bool))
    assert (several.info.classes, several.info.target.shape, several.y_train.dtype) == (0, (2,), np.float32)
    masks = own(y=np.zeros((N, 4, 4), bool))
    assert (masks.info.classes, masks.info.target.shape) == (2, (4, 4))


def test_public_constants_normalise() -> None:
    data = own(mean=2.0, std=(1.0, 2.0, 4.0), features=("a", "b", "c"), name="wards")
    assert data.info.name == "wards"
    assert data.origin is not None
    assert data.origin.features == ("a", "b", "c")
    assert np.allclose(data.standardise(np.array([[3.0, 4.0, 6.0]], np.float32)), 1.0)
    pictures = own(np.full((N, 1, 2, 2), 255, np.uint8))
    assert np.allclose(pictures.standardise(pictures.x_train), 1.0)


def test_test_data_of_their_own() -> None:
    data = own(y=Y == 1, test=(X[:5].astype(np.float64), Y[:5]))
    assert (len(data.x_train), len(data.x_test), data.info.users) == (N, 5, 10)
    assert data.origin is not None
    assert data.origin.test == "test data of their own"
    counted = own(test=(X[:5], np.zeros(5, int)))
    assert counted.info.classes == 2
    assert counted.y_test.tolist() == [0] * 5


def test_clients_are_integers_or_text_and_the_split_holds_whole_ones_out() -> None:
    data = own()
    assert data.users_train is not None
    assert data.users_test is None
    assert data.info.users == len(set(data.users_train.tolist())) == 10 - len(data.x_test) // 4
    texts = own(client=[f"p{i}" for i in WHO])
    assert texts.users_train is not None
    none = own(client=None)
    assert (none.users_train, len(none.x_test)) == (None, 8)


def test_by_time() -> None:
    days = np.datetime64("2024-01-01") + np.arange(N)
    late = own(test={"latest": days, "since": "2024-02-01"})
    assert (len(late.x_test), float(late.x_test.min())) == (N - 31, float(X[31].min()))
    assert len(own(test={"latest": [str(day) for day in days], "share": 0.25}).x_test) == 10
    with pytest.raises(
        DataError, match="test: latest: give one time for each of the 40 examples: numbers, dates, or text such as"
    ):
        own(test={"latest": ["soon"] * N, "share": 0.25})
    with pytest.raises(DataError, match=r"test: latest: give one time for each .* without a time zone, which would be lost"):
        own(test={"latest": ["2024-07-01T00:00:00+02:00"] * N, "share": 0.25})


def test_a_date_among_numbers_does_not_make_years_of_them() -> None:
    """One did, and years so far away are not held in order: what all others trained on changed."""
    numbers = [(19700101, 20100101, 20200101)[i % 3] for i in range(N)]
    one, other = (own(test={"latest": times, "since": "20200101"}) for times in (numbers, [str(day) for day in numbers]))
    assert one.x_train.tolist() == other.x_train.tolist()
    with pytest.raises(DataError, match="test: latest: give one time for each"):
        own(test={"latest": [*map(str, numbers[1:]), "2020-01-01"], "since": "20200101"})


def test_repr_says_what_was_made() -> None:
    assert repr(own(X.astype(np.float64), Y == 1, test=0.25, name="wards")) == (
        "wards: 30 examples of 10 clients to train, 10 to test; inputs (3) float32, targets 2 classes\n"
        "  from arrays; test split: a random 0.25 of each client's examples\n"
        "  cast: examples float64 -> float32\n"
        "  cast: labels bool -> int64"
    )


OBJECTS = np.empty(N, dtype=object)
LARGE = np.full((N, 3), 2**24 + 1)
BAD = X.copy()
BAD[3, 1], BAD[7, 0] = np.nan, np.inf
DAY = np.timedelta64(1, "D")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "objects": (
        {"x": OBJECTS},
        "x: objects: make it one array of numbers; sequences and pictures of different sizes must be padded to one shape",
    ),
    "ragged": (
        {"x": [[1.0]] * (N - 1) + [[1.0, 2.0]]},
        "x: objects: make it one array of numbers; sequences and pictures of different sizes must be padded to one shape",
    ),
    "text": (
        {"x": np.full((N, 2), "a")},
        "x: text: give numbers; for columns of text use from_frame with a public list of their values, categories={...}",
    ),
    "dates": (
        {"x": np.full((N, 2), np.datetime64("2024-01-01"))},
        "x: dates: give numbers, such as days since a public date: (dates - np.datetime64('2024-01-01')) / np.timedelta64(1, "
        "'D')",
    ),
    "differences": ({"x": np.full(N, DAY)}, "x: time differences: give numbers, such as differences / np.timedelta64(1, 'D')"),
    "complex": ({"x": X.astype(np.complex64)}, "x: complex numbers: give real and imaginary part as two numbers"),
    "large": (
        {"x": LARGE},
        "x holds whole numbers beyond 16777216, which float32 does not hold apart: divide it by a public number and give it as "
        "floats, or leave it out if it is an id",
    ),
    "nan": (
        {"x": BAD},
        "x: 2 of 40 examples hold NaN, infinite numbers, or numbers beyond float32, the first is 3: put a public constant in "
        "their place, or leave these examples out",
    ),
    "overflow": (
        {"y": np.full(N, 1e300)},
        "y: 40 of 40 examples hold NaN, infinite numbers, or numbers beyond float32, the first is 0: put a public constant in "
        "their place, or leave these examples out",
    ),
    "no examples": ({"x": X[:0]}, "x has no examples: give an array of shape (examples, ...)"),
    "no targets": ({"y": Y[:0]}, "y has no targets: give one for each example"),
    "other length": ({"y": Y[:9]}, "x has 40 examples and y has 9: give one target for each example"),
    "channels last": (
        {"x": np.zeros((N, 8, 8, 3), np.uint8)},
        "x has shape (40, 8, 8, 3), which looks like (examples, height, width, channels): give (examples, channels, height, "
        "width), as x.transpose(0, 3, 1, 2) is",
    ),
    "channels last, floats": (
        {"x": np.zeros((N, 8, 8, 3), np.float32)},
        "x has shape (40, 8, 8, 3), which looks like (examples, height, width, channels): give (examples, channels, height, "
        "width), as x.transpose(0, 3, 1, 2) is",
    ),
    "sparse": ({"x": csr_matrix(X)}, "x is a sparse matrix (csr_matrix): give x.toarray()"),
    "large floats": (
        {"x": LARGE.astype(np.float64)},
        "x holds whole numbers beyond 16777216, which float32 does not hold apart: divide it by a public number and give it as "
        "floats, or leave it out if it is an id",
    ),
    "two that are one float": (
        {"x": np.array([2**53 + i % 2 for i in range(N)]).astype(np.float64)},
        "x holds whole numbers beyond 16777216, which float32 does not hold apart: divide it by a public number and give it as "
        "floats, or leave it out if it is an id",
    ),
    "64 bits": (
        {"y": np.full(N, 2**63, np.uint64), "classes": 0},
        "y holds whole numbers beyond 16777216, which float32 does not hold apart: divide it by a public number and give it as "
        "floats, or leave it out if it is an id",
    ),
    "float tokens": (
        {"vocabulary": 5},
        "x is float32 and vocabulary = 5: tokens are whole numbers; give an array of integers",
    ),
    "tokens outside": (
        {"x": np.full((N, 2), 5), "vocabulary": 5},
        "x: tokens go from 5 to 5, and vocabulary = 5 allows 0 to 4: correct one of them",
    ),
    "negative labels": (
        {"y": np.where(Y == 1, 1, -1)},
        "y: labels go from -1 to 1 and are not 0, 1, ... without a gap: give classes=[...], the public list of all labels (or "
        "classes=0, if they are quantities)",
    ),
    "gap": (
        {"y": Y * 2},
        "y: labels go from 0 to 2 and are not 0, 1, ... without a gap: give classes=[...], the public list of all labels (or "
        "classes=0, if they are quantities)",
    ),
    "one class": (
        {"y": Y * 0},
        "y holds one label only, so there is nothing to learn: give classes=..., if there can be others",
    ),
    "text labels": ({"y": np.where(Y == 1, "a", "b")}, "y: text: give classes=[...], the public list of its labels"),
    "text labels, number": (
        {"y": np.where(Y == 1, "a", "b"), "classes": 2},
        "y: text: give classes=[...], the public list of its labels",
    ),
    "unlisted label": (
        {"y": np.where(Y == 1, "a", "b"), "classes": ["a", "c"]},
        "y holds 1 label that classes does not list (a, c): list all possible labels, or leave these examples out",
    ),
    "too many labels": (
        {"y": np.arange(N) % 4, "classes": 3},
        "y: labels go from 0 to 3, and classes = 3 allows 0 to 2: correct one of them",
    ),
    "fractions": (
        {"y": Y / 3, "classes": 2},
        "y holds numbers that are not whole, and classes is given: leave classes out for quantities",
    ),
    "one place": (
        {"y": Y[:, None]},
        "y holds one integer in a list of its own each: give y[:, 0], or, of a table, the name of the target and no list",
    ),
    "one-hot": (
        {"y": np.eye(3, dtype=int)[np.arange(N) % 3]},
        "y holds one 1 in each row, which looks one-hot: give the number of the class, y.argmax(1); or classes=0 for a 0 or 1 "
        "for each of several labels",
    ),
    "many places": (
        {"y": np.stack([Y, Y], 1)},
        "y holds (2,) integers for each example: give classes=..., how many classes each place can have, or classes=0 for "
        "quantities, such as times, and for a 0 or 1 for each of several labels",
    ),
    "too few clients": ({"client": WHO[:9]}, "client has shape (9,): give one id for each of the 40 examples"),
    "float clients": (
        {"client": WHO / 2},
        "client is float64: give everybody an id that is an integer or text, and leave out examples without one",
    ),
    "missing clients": (
        {"client": [None, *WHO[1:].tolist()]},
        "client is object: give everybody an id that is an integer or text, and leave out examples without one",
    ),
    "missing text clients": (
        {"client": [float("nan"), *["a", "b", "c"] * 13]},
        "client is object: give everybody an id that is an integer or text, and leave out examples without one",
    ),
    "empty clients": (
        {"client": ["", *["a"] * (N - 1)]},
        "client has 1 empty id: leave these examples out, or name their clients",
    ),
    "empty clients, objects": (
        {"client": np.array([*[""] * 2, *["a"] * (N - 2)], dtype=object)},
        "client has 2 empty ids: leave these examples out, or name their clients",
    ),
    "no clients to hold out": (
        {"client": None, "test": {"clients": 0.2}},
        "test = {'clients': 0.2} holds out clients, and none are named: give client=...",
    ),
}

IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "catalogue": ({"name": "digits"}, "name = 'digits' is the name of a data set of fedveil: choose another"),
    "one listed": (
        {"classes": ["a"]},
        "classes = ('a',): give the public list of two or more labels, how many there are, or 0 for quantities",
    ),
    "one said": (
        {"classes": 1},
        "classes = 1: give the public list of two or more labels, how many there are, or 0 for quantities",
    ),
    "listed twice": (
        {"classes": [1, "1"]},
        "classes = [1, '1'] names a label twice: give each once; a column of numbers holds '1', '01' and '1.0' as one",
    ),
    "from data": (
        {"mean": "from data"},
        "mean and std = 'from data': nothing is computed from private data without noise; give public constants, from a public "
        "table or the range that the values can have, such as mean=50.0, std=20.0",
    ),
    "std": ({"std": (1.0, 0.0, 1.0)}, "std = (1.0, 0.0, 1.0): give numbers above 0"),
    "means": ({"mean": (1.0, 2.0)}, "mean has 2 numbers: give one, or one for each of the 3 channels or features of x"),
    "features": ({"features": ("a",)}, "features names 1 inputs, and x has (3,) for each example: name each once"),
    "a set": ({"classes": {"a", "b"}}, "classes is given as a set, which has no order of its own: give a list"),
    "one name": ({"features": "age"}, "features = 'age': give a list of columns, such as ['age']"),
    "unknown": (
        {"vocabular": 3},
        "vocabular = 3: unknown key (did you mean 'vocabulary'?); allowed here: name, classes, unit, test, split_seed, features, "
        "mean, std, scale, vocabulary",
    ),
}


@pytest.mark.parametrize("case", [*REFUSED, *IMPOSSIBLE])
def test_refusals(case: str) -> None:
    changed, wanted = (REFUSED | IMPOSSIBLE)[case]
    with pytest.raises(FedveilError) as caught:
        own(**changed)
    assert str(caught.value) == wanted
    assert type(caught.value) is (DataError if case in REFUSED else ConfigError)


def test_large_whole_numbers_that_lose_nothing_are_cast() -> None:
    """What float32 holds is no loss, nor are floats whose steps are larger than one."""
    for kept in (np.full((N, 3), 2**25), X.astype(np.float64) * 1e30, LARGE.astype(np.float32), LARGE + 0.5):
        assert (own(kept).x_train == kept[0].astype(np.float32)).all(1).any() or kept is not LARGE


@pytest.mark.parametrize(("y", "hint"), [(np.eye(3)[np.arange(N) % 3], r"y\.argmax\(1\)"), (Y[:, None] * 1.0, r"y\[:, 0\]")])
@pytest.mark.parametrize("classes", [None, 3])
def test_a_task_of_classes_says_how_targets_of_keras_become_those(y: Any, hint: str, classes: int | None) -> None:
    config = fv.configure(model="linear", privacy={"delta": 1e-3})
    with pytest.raises(ConfigError, match=f"task.name = 'classification' .* .give {hint}"):
        fv.certify(config, data=own(y=y, classes=classes))
