"""What transforms draw for an item follows from that item alone: other items, their order and their draws change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import mtrand
from numpy.typing import NDArray

import fedveil as fv
from fedveil.data.own.drawn_by_item import items_by_themselves, read_by_row
from fedveil.errors import DataError

N = 150
X = torch.from_numpy(np.random.default_rng(3).normal(size=(N, 1, 4, 4)).astype(np.float32))
Y = np.arange(N) % 2
Draw = Callable[[], Any]
DRAWS: dict[str, Draw] = {
    "torch": lambda: torch.randint(-2, 3, (2,)).tolist(),
    "numpy": lambda: np.random.randint(-2, 3, 2).tolist(),  # noqa: NPY002 : the generator that transforms draw from
    "normals of numpy": lambda: (8 * np.random.normal(size=2)).astype(int).tolist(),  # noqa: NPY002
    "random": lambda: [random.randint(-2, 2), random.randint(-2, 2)],
}
TEST = (X[:6].numpy(), Y[:6])


class Shifted:
    """Pictures moved at random; for a dark one more is drawn, as transforms do that draw until a crop fits."""

    def __init__(self, x: Any, y: NDArray[np.int64], draw: Draw) -> None:
        self.x, self.y, self.draw = x, y, draw

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        moved = torch.roll(self.x[i], self.draw(), (1, 2))
        if not self.x[i].any():
            for draw in DRAWS.values():
                draw()
        return moved, int(self.y[i])


def pictures(items: list[Any]) -> NDArray[np.float32]:
    return np.stack([item[0].numpy() for item in items])


@pytest.fixture(params=DRAWS)
def draw(request: pytest.FixtureRequest) -> Draw:
    return DRAWS[request.param]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A program that seeds: what its transforms draw is then public."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


def test_one_example_less_leaves_all_others_as_they_are_to_the_bit(draw: Draw) -> None:
    every = fv.from_torch(Shifted(X, Y, draw), test=TEST, classes=2).x_train
    seeded_again = fv.from_torch(Shifted(X[1:], Y[1:], draw), test=TEST, classes=2).x_train
    assert every[1:].tobytes() == seeded_again.tobytes()


def test_an_example_that_draws_more_leaves_all_others_as_they_are_to_the_bit(draw: Draw) -> None:
    dark = X.clone()
    dark[0] = 0
    first, second = (fv.from_torch(Shifted(x, Y, draw), test=TEST, classes=2).x_train for x in (X, dark))
    assert first[1:].tobytes() == second[1:].tobytes()
    assert not second[0].any()


def test_a_test_set_of_torch_is_read_so_too(draw: Draw) -> None:
    """Numbers on the test set are published, and one of its examples may not change what the others are either."""
    whole = fv.from_torch(Shifted(X, Y, draw), test=Shifted(X[:40], Y[:40], draw), classes=2).x_test
    less = fv.from_torch(Shifted(X, Y, draw), test=Shifted(X[1:40], Y[1:40], draw), classes=2).x_test
    assert whole[1:].tobytes() == less.tobytes()


def test_order_changes_nothing(draw: Draw) -> None:
    forth = pictures(items_by_themselves(Shifted(X, Y, draw)))
    back = pictures(items_by_themselves(Shifted(X.flip(0), Y[::-1], draw)))
    assert np.array_equal(back[::-1], forth)


def test_draws_differ_from_item_to_item_and_not_from_run_to_run(draw: Draw) -> None:
    """Else all would be moved alike, or the data card of a resumed run would tell of other data."""
    found = pictures(items_by_themselves(Shifted(X, Y, draw)))
    rows = {one.tobytes() for one in found}
    moves = {(i, j) for x, one in zip(X, found, strict=True) for i in range(4) for j in range(4) if _is(x, one, i, j)}
    assert (len(rows), len(moves)) == (N, 16), "each of the 16 places comes up among 150"
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert np.array_equal(pictures(items_by_themselves(Shifted(X, Y, draw))), found)


def _is(x: torch.Tensor, moved: NDArray[np.float32], i: int, j: int) -> bool:
    return np.array_equal(torch.roll(x, (i, j), (1, 2)).numpy(), moved)


def test_the_three_generators_draw_different_numbers() -> None:
    """Python's and numpy's have one algorithm: of one seed, what each decides would always agree."""

    class Both:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, i: int) -> list[float]:
            return [float(i), np.random.random(), random.random(), float(torch.rand(1))]  # noqa: NPY002

    drawn = np.array(items_by_themselves(Both()))[:, 1:]
    assert np.abs(np.corrcoef(drawn.T)[~np.eye(3, dtype=bool)]).max() < 0.4, "four standard deviations of 1 / sqrt(100)"


def states() -> list[bytes]:
    held = mtrand._rand.get_state(legacy=False)
    return [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(), repr(_listed(held)).encode()]


def _listed(state: Any) -> Any:
    if isinstance(state, dict):
        return [(key, _listed(one)) for key, one in state.items()]
    return state.tolist() if isinstance(state, np.ndarray) else state


@pytest.fixture(params=["numpy's own", "PCG64"])
def generator(request: pytest.FixtureRequest) -> Iterator[None]:
    """A program may have put another bit generator behind numpy's global functions."""
    before = mtrand.get_bit_generator()
    if request.param == "PCG64":
        mtrand.set_bit_generator(np.random.PCG64(7))
    yield
    mtrand.set_bit_generator(before)


@pytest.mark.usefixtures("generator")
def test_the_program_draws_on_as_if_nothing_had_been_read(draw: Draw) -> None:
    """To the normal that numpy holds back for its next call, and also where reading fails."""
    np.random.normal()  # noqa: NPY002
    random.gauss()
    before = states()
    items_by_themselves(Shifted(X, Y, draw))
    assert states() == before
    with pytest.raises(IndexError):
        items_by_themselves(Shifted(X[:100], Y, draw))
    assert states() == before


def test_what_draws_nothing_is_read_once_but_for_those_that_are_probed() -> None:
    class Counted(list[tuple[int, int]]):
        reads = 0

        def __getitem__(self, i: Any) -> Any:
            self.reads += 1
            return super().__getitem__(i)

    items = [(i, i % 2) for i in range(6400)]
    counted = Counted(items)
    assert items_by_themselves(counted) == items
    assert counted.reads == 6400 + 64


class OwnGenerator(Shifted):
    """The same with a generator that nobody else knows."""

    def __init__(self, rare: bool) -> None:
        super().__init__(X, Y, lambda: None)
        own = np.random.default_rng(0)
        self.draw = lambda: (int(own.integers(0, 2)) if rare else 1 + int(own.integers(3)), 0)


@pytest.mark.parametrize("rare", [False, True])
def test_a_generator_of_its_own_is_refused(rare: bool) -> None:
    """Its state cannot be set from here. A coin may fall alike twice, so that one item would not show it."""
    with pytest.raises(DataError, match=r"^item \d+ of the OwnGenerator differs when it is read again, .*: draw from the global"):
        fv.from_torch(OwnGenerator(rare), test=TEST, classes=2)


def test_what_depends_on_items_that_were_read_before_is_refused() -> None:
    class Centred(Shifted):
        total = torch.zeros(1, 4, 4)

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            self.total = self.total + self.x[i]
            return self.x[i] - self.total, int(self.y[i])

    with pytest.raises(DataError, match=r"depends on what was read before, so that one example would change others"):
        fv.from_torch(Centred(X, Y, lambda: None), test=TEST, classes=2)


@pytest.mark.parametrize("seed", [torch.manual_seed, np.random.seed, random.seed], ids=["torch", "numpy", "random"])
def test_an_item_that_seeds_by_its_place_is_refused(seed: Callable[[int], Any], draw: Draw) -> None:
    """One example less would give all behind it the places, and the draws, of others."""

    class Placed(Shifted):
        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            seed(i)
            return super().__getitem__(i)

    with pytest.raises(
        DataError, match=r"^item 0 of the Placed seeds a global generator itself: .* without seeding them"
    ) as error:
        fv.from_torch(Placed(X, Y, draw), test=TEST, classes=2)
    assert "\n" not in str(error.value)


class Transformed:
    """As a `datasets.Dataset` with `set_transform`: the function takes a dict of lists, whatever is asked for."""

    def __init__(self, columns: dict[str, list[Any]], transform: Callable[[dict[str, list[Any]]], dict[str, Any]]) -> None:
        self._columns, self._transform = columns, transform
        self.features = dict.fromkeys(columns)
        self.column_names = list(columns)
        self.format = {"type": "custom", "format_kwargs": {"transform": transform}, "columns": self.column_names}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self._transform(self._columns)[key]
        return {name: one[0] for name, one in self._transform({name: [v[key]] for name, v in self._columns.items()}).items()}


def noisy(batch: dict[str, list[Any]]) -> dict[str, Any]:
    """Adds noise, and takes off the mean of whatever it is given: of a whole column, one example would move all."""
    ages = np.array(batch["age"]) + np.random.normal(size=len(batch["age"]))  # noqa: NPY002
    return {**batch, "age": list(ages - 0.5 * np.mean(batch["age"])), "moved": [np.roll(batch["pixels"][0], 1)] * len(ages)}


def transformed(*, without: int = 0, transform: Any = noisy) -> Transformed:
    places = range(without, N)
    columns: dict[str, list[Any]] = {
        "age": [20.0 + i for i in places],
        "label": [i % 2 for i in places],
        "who": [f"p{i % 5}" for i in places],
    }
    return Transformed({**columns, "pixels": [X[i].numpy() for i in places]}, transform)


@pytest.mark.parametrize("features", [["age"], "age", "moved"], ids=str)
def test_rows_that_a_function_of_the_program_makes_are_read_one_by_one(features: Any) -> None:
    """Also columns that this function adds; of the first example nothing shows in the others."""
    whole, less = (
        fv.from_huggingface(transformed(without=k), features=features, client="who", test=transformed(without=100 + k), classes=2)
        for k in (0, 1)
    )
    assert (len(whole.x_train), len(less.x_train), len(less.x_test)) == (N, N - 1, 49)
    assert whole.x_train[1:].tobytes() == less.x_train.tobytes()
    assert whole.x_test[1:].tobytes() == less.x_test.tobytes()
    assert whole.users_train is not None
    assert less.users_train is not None


def test_from_frame_reads_them_so_too() -> None:
    whole, less = (
        fv.from_frame(transformed(without=k), target="label", features=["age"], test=transformed(without=k), classes=2)
        for k in (0, 1)
    )
    assert whole.x_train[1:].tobytes() == less.x_train.tobytes()
    assert whole.x_test[1:].tobytes() == less.x_test.tobytes()


def test_times_of_the_test_split_are_of_such_rows() -> None:
    data = fv.from_huggingface(transformed(), features="moved", client="who", test={"latest": "age", "since": 80}, classes=2)
    assert 0 < len(data.x_test) < N


def test_rows_with_different_columns_are_refused() -> None:
    def uneven(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return batch if batch["label"][0] else {"label": batch["label"]}

    with pytest.raises(DataError, match="does not make the same columns of all rows: let it make label of each"):
        fv.from_huggingface(transformed(transform=uneven), features="age")


def test_other_tables_are_left_as_they_are() -> None:
    """Reading whole columns is faster, and nothing of the program's runs then."""
    plain = transformed()
    plain.format = {**plain.format, "type": "numpy"}
    frame = {"format": [1, 2]}
    assert read_by_row(plain) is plain
    assert read_by_row(frame) is frame
    assert read_by_row(None) is None
    assert set(read_by_row(transformed())) == {"age", "label", "who", "pixels", "moved"}
