"""Public part, per-client test sets, users on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedveil.data.catalogue import CATALOGUE
from fedveil.data.dataset import Dataset
from fedveil.data.load import load
from fedveil.data.partition import ClientIndices, Partition, partition
from fedveil.data.split import client_test_split, public_split, split_within_users
from fedveil.errors import ConfigError, DataError


@given(total=st.integers(2, 500), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_public_split(total: int, fraction: float, seed: int) -> None:
    size = int(total * fraction)
    if size == 0:
        with pytest.raises(ConfigError, match="public split of 0"):
            public_split(total, seed=seed, fraction=fraction)
        return
    private, public = public_split(total, seed=seed, fraction=fraction)
    assert len(public) == size
    assert np.array_equal(np.sort(np.concatenate([private, public])), np.arange(total))
    again = public_split(total, seed=seed, size=size)
    assert np.array_equal(again[1], public)


def test_public_split_changes_with_the_seed_and_is_kept_from_clients() -> None:
    private, public = public_split(1000, seed=1, size=100)
    assert not np.array_equal(public, public_split(1000, seed=2, size=100)[1])
    part = partition("iid", np.zeros(1000, int), clients=9, seed=1, among=private)
    assert np.array_equal(np.sort(part.clients.order), private)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"fraction": 0.1, "size": 5},
        {"size": 0},
        {"size": 10},
        {"size": True},
        {"fraction": 0.0},
        {"fraction": 1.0},
        {"fraction": float("nan")},
    ],
)
def test_public_split_refuses(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="public"):
        public_split(10, seed=1, **wrong)  # type: ignore[arg-type]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_client_test_split(sizes: list[int], fraction: float, seed: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    part = Partition(ClientIndices(np.random.default_rng(5).permutation(int(offsets[-1])), offsets), "iid", 1)
    train, test = client_test_split(part, fraction, seed=seed)
    assert len(train) == len(test) == len(sizes)
    for client, size in enumerate(sizes):
        kept, held = train.indices(client), test[client]
        assert sorted([*kept, *held]) == sorted(part.indices(client))
        assert len(held) == max(0, min(int(np.floor(fraction * size + 0.5)), size - 1))
        assert len(kept) >= min(1, size)
    again = client_test_split(part, fraction, seed=seed)
    assert again[0].fingerprint() == train.fingerprint()
    assert np.array_equal(again[1].order, test.order)


def test_client_test_split_is_random_within_the_client() -> None:
    part = partition("iid", np.zeros(2000, int), clients=2, seed=1)
    position = np.zeros(1000)
    for seed in range(200):
        _, test = client_test_split(part, 0.2, seed=seed)
        position += np.isin(part.indices(0), test[0])
    assert abs(position.mean() - 40) < 1e-9
    assert 4 < position.std() < 8
    assert abs(position[:500].mean() - position[500:].mean()) < 1.5
    with pytest.raises(ConfigError, match="client_test_fraction = 1"):
        client_test_split(part, 1.0, seed=1)


def natural(sizes: list[int]) -> tuple[NDArray[np.int64], Partition]:
    """The users of examples of so many users, in turns, and their partition."""
    users = np.argsort(np.concatenate([np.linspace(0, 1, n, endpoint=False) for n in sizes]), kind="stable")
    users = np.repeat(np.arange(len(sizes)), sizes)[users]
    return users, partition("users", np.zeros(len(users), int), seed=1, users=users)


def in_place(users: NDArray[np.int64], chosen: NDArray[np.int64]) -> list[list[int]]:
    """Which of each user's examples are chosen, by their places among its examples."""
    return [np.flatnonzero(np.isin(np.flatnonzero(users == user), chosen)).tolist() for user in range(users.max() + 1)]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(6, 30), min_size=2, max_size=12),
    seed=st.integers(0, 99),
    fraction=st.floats(0.2, 0.9),
    data=st.data(),
)
def test_what_one_client_has_changes_nobody_elses_split(
    sizes: list[int], seed: int, fraction: float, data: st.DataObject
) -> None:
    """Neighbouring data differ in one client alone; a draw over all examples together changed the training sets of all others."""
    changed = data.draw(st.integers(0, len(sizes) - 1))
    others = sizes.copy()
    others[changed] = data.draw(st.integers(1, 40))
    tests, publics = [], []
    for each in (sizes, others):
        users, part = natural(each)
        tests.append(in_place(users, client_test_split(part, fraction, seed=seed)[1].order))
        private, public = public_split(len(users), seed=seed, fraction=fraction, users=users)
        assert np.array_equal(np.sort(np.concatenate([private, public])), np.arange(len(users)))
        publics.append(in_place(users, public))
    for first, second in (tests, publics):
        assert [part for user, part in enumerate(first) if user != changed] == [
            part for user, part in enumerate(second) if user != changed
        ]


def test_each_client_has_a_split_of_its_own() -> None:
    users, part = natural([100] * 50)
    for chosen in (client_test_split(part, 0.2, seed=1)[1].order, public_split(5000, seed=1, fraction=0.2, users=users)[1]):
        held = in_place(users, chosen)
        assert {len(own) for own in held} == {20}
        assert len({tuple(own) for own in held}) == 50
        counts = np.bincount(np.concatenate(held), minlength=100)
        assert counts.max() < 25, "no place is preferred: 10 expected, deviation 2.8"


def test_the_public_share_of_small_users_is_right_on_average() -> None:
    users = np.repeat(np.arange(4000), 3)
    private, public = public_split(12_000, seed=3, fraction=0.1, users=users)
    assert abs(len(public) - 1200) < 5 * np.sqrt(4000 * 0.3 * 0.7)
    assert np.bincount(users[private], minlength=4000).min() >= 2
    most = public_split(12_000, seed=3, fraction=0.99, users=users)[0]
    assert (np.bincount(users[most]) == 1).all(), "each keeps one to train on"
    with pytest.raises(ConfigError, match="a public split of 0 from 10 training examples of 10 users"):
        public_split(10, seed=1, fraction=0.9, users=np.arange(10))


def test_split_within_users() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 9, 128)).astype(np.float32)
    x[:, 0, 0] = np.arange(60)
    y = np.tile(np.repeat(np.arange(3), 10), 2)
    users = np.repeat([4, 9], 30)
    data = Dataset(CATALOGUE["uci-har"], x[:30], y[:30], x[30:], y[30:], users[:30], users[30:])
    again = split_within_users(data, 0.25)
    assert len(again.x_test) == 12
    assert again.users_train is not None
    assert set(again.users_train) == {4, 9}
    assert again.x_test[:, 0, 0].tolist() == [8, 9, 18, 19, 28, 29, 38, 39, 48, 49, 58, 59]
    assert np.array_equal(y[again.x_train[:, 0, 0].astype(int)], again.y_train)
    assert np.array_equal(users[again.x_train[:, 0, 0].astype(int)], again.users_train)
    with pytest.raises(ConfigError, match="leaves no test examples"):
        split_within_users(data, 0.05)
    with pytest.raises(DataError, match="no natural users"):
        split_within_users(load("digits"), 0.2)
