"""Partitions: what all of them keep, and the exact structure of each kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scipy.stats import chi2_contingency, kstest

from fedveil.data.partition import Partition, checked_options, from_options, partition
from fedveil.data.partition_options import PARTITIONS, AnyPartition
from fedveil.errors import ConfigError

CIFAR = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))

KINDS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.5, "too_small": "top-up"},
    "shards": {"per_client": 2},
    "label-count": {"labels_per_client": 3},
    "users": {},
    "private-label-isolation": {"private_label": 1},
    "ladp-1": {"private_label": 1, "labels_per_client": 2},
    "ladp-2": {"private_label": 1, "alpha": 0.1},
}


def check(part: Partition, total: int, clients: int) -> None:
    """Disjoint, in range, ascending, as many as announced."""
    assert len(part) == len(part.clients) == clients
    everything = np.concatenate(list(part.clients))
    assert everything.dtype == np.int64
    assert len(np.unique(everything)) == len(everything) == part.sizes.sum()
    assert everything.min() >= 0
    assert everything.max() < total
    for client in range(clients):
        indices = part.indices(client)
        assert (np.diff(indices) > 0).all()
        assert len(indices) == part.sizes[client]


def test_every_kind_is_tested() -> None:
    assert set(KINDS) == set(PARTITIONS)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_all_kinds_keep(kind: str, data: st.DataObject) -> None:
    # with two clients, one of them barred from a frequent label, the public labels may not suffice: refused, tested below
    clients = data.draw(st.integers(3 if kind == "private-label-isolation" else 2, 12))
    seed = data.draw(st.integers(0, 2**63 - 1))
    sizes = data.draw(st.lists(st.integers(40, 90), min_size=3, max_size=6))
    labels = np.random.default_rng(7).permutation(np.repeat(np.arange(len(sizes)), sizes))
    users = np.arange(len(labels)) % 12
    part = partition(kind, labels, clients=clients, seed=seed, users=users, **KINDS[kind])
    check(part, len(labels), clients)
    assert part.sizes.min() >= 1
    assert (part.kind, part.seed) == (kind, seed)
    again = partition(kind, labels, clients=clients, seed=seed, users=users, **KINDS[kind])
    assert again.fingerprint() == part.fingerprint()
    assert all(np.array_equal(a, b) for a, b in zip(part.clients, again.clients, strict=True))
    among = np.sort(np.random.default_rng(3).permutation(len(labels))[: len(labels) * 9 // 10])
    fewer = partition(kind, labels, clients=clients, seed=seed, users=users, among=among, **KINDS[kind])
    check(fewer, len(labels), clients)
    assert np.isin(np.concatenate(list(fewer.clients)), among).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "users"])
def test_seed_decides(kind: str) -> None:
    prints = {partition(kind, CIFAR, clients=10, seed=seed, **KINDS[kind]).fingerprint() for seed in range(5)}
    assert len(prints) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_global_random_state_is_untouched(kind: str) -> None:
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]  # noqa: NPY002
    partition(kind, CIFAR, clients=10, seed=1, users=CIFAR, **KINDS[kind])
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


def test_iid_sizes_and_randomness() -> None:
    part = partition("iid", CIFAR, clients=7, seed=1)
    assert sorted(set(part.sizes)) == [7142, 7143]
    assert part.sizes.sum() == 50000
    assert chi2_contingency(part.label_counts(CIFAR, 10)).pvalue > 1e-4
    sixty = partition("iid", CIFAR, clients=800, seed=1, examples_per_client=60)
    assert set(sixty.sizes) == {60}
    by_position = np.sort(CIFAR)
    assert chi2_contingency(partition("iid", by_position, clients=7, seed=1).label_counts(by_position, 10)).pvalue > 1e-4


def test_a_million_clients() -> None:
    labels = np.zeros(1_000_000, dtype=np.int64)
    part = partition("iid", labels, clients=1_000_000, seed=1)
    assert len(part) == 1_000_000
    assert set(part.sizes) == {1}
    assert np.array_equal(np.sort(part.clients.order), np.arange(1_000_000))
    assert len(part.indices(999_999)) == 1


def test_clients_as_a_sequence() -> None:
    part = partition("iid", CIFAR, clients=10, seed=1)
    assert np.array_equal(part.clients[-1], part.indices(9))
    assert len(part.clients[2:5]) == 3
    assert np.array_equal(part.clients[2:5][1], part.indices(3))
    for outside in (10, -11):
        with pytest.raises(IndexError, match="of 10"):
            part.clients[outside]


def test_dirichlet_shares_follow_the_distribution() -> None:
    """A label's share with the first client is Beta(alpha, alpha (n - 1)); another alpha is told apart."""
    alpha, clients = 0.5, 5
    labels = np.repeat(np.arange(10), 2000)
    shares = np.concatenate(
        [
            partition("dirichlet", labels, clients=clients, alpha=alpha, seed=seed).label_counts(labels, 10)[0] / 2000
            for seed in range(60)
        ]
    )
    assert kstest(shares, "beta", args=(alpha, alpha * (clients - 1))).pvalue > 1e-3
    for wrong in (alpha * 2 / 3, alpha * 3 / 2):
        assert kstest(shares, "beta", args=(wrong, wrong * (clients - 1))).pvalue < 1e-3


def test_dirichlet_deals_everything_out_with_a_minimum() -> None:
    part = partition("dirichlet", CIFAR, clients=20, alpha=0.3, min_size=300, seed=1)
    assert part.sizes.sum() == 50000
    assert part.sizes.min() >= 300
    assert (part.label_counts(CIFAR, 10).sum(axis=0) == 5000).all()


def test_dirichlet_that_cannot_reach_its_minimum() -> None:
    with pytest.raises(ConfigError, match=r"no draw of 50 with alpha = 0.01 .* min_size = 1 .*top-up"):
        partition("dirichlet", CIFAR, clients=100, alpha=0.01, max_tries=50, seed=1)
    empty = partition("dirichlet", CIFAR, clients=100, alpha=0.01, min_size=0, seed=1)
    assert empty.sizes.min() == 0
    assert empty.sizes.sum() == 50000
    filled = partition("dirichlet", CIFAR, clients=100, alpha=0.01, min_size=25, too_small="top-up", seed=1)
    assert filled.sizes.min() == 25
    assert filled.sizes.sum() == 50000
    with pytest.raises(ConfigError, match="need 60000 examples; there are 50000"):
        partition("dirichlet", CIFAR, clients=100, alpha=1.0, min_size=600, seed=1)


def test_shards() -> None:
    part = partition("shards", CIFAR, clients=100, per_client=2, seed=1)
    assert set(part.sizes) == {500}
    counts = part.label_counts(CIFAR, 10)
    assert (np.count_nonzero(counts, axis=1) <= 2).all()
    assert set(np.unique(counts)) == {0, 250, 500}
    uneven = partition("shards", CIFAR[:1003], clients=10, per_client=3, seed=1)
    assert uneven.sizes.sum() == 1003
    assert np.ptp(uneven.sizes) <= 3


@pytest.mark.parametrize("labels_per_client", [1, 2, 3, 10])
def test_label_count(labels_per_client: int) -> None:
    part = partition("label-count", CIFAR, clients=50, labels_per_client=labels_per_client, seed=1)
    counts = part.label_counts(CIFAR, 10)
    assert (np.count_nonzero(counts, axis=1) == labels_per_client).all()
    holders = np.count_nonzero(counts, axis=0)
    assert (holders == 5 * labels_per_client).all()
    assert (counts.sum(axis=0) == 5000).all()
    for label in range(10):
        amounts = counts[:, label][counts[:, label] > 0]
        assert np.ptp(amounts) <= 1


def test_label_count_that_is_impossible() -> None:
    with pytest.raises(ConfigError, match="only 10"):
        partition("label-count", CIFAR, clients=50, labels_per_client=11, seed=1)
    with pytest.raises(ConfigError, match="4 clients with 2 labels each cannot hold all 10 labels"):
        partition("label-count", CIFAR, clients=4, labels_per_client=2, seed=1)
    with pytest.raises(ConfigError, match="hold label 0"):
        partition("label-count", np.repeat([0, 1], [2, 50]), clients=20, labels_per_client=2, seed=1)


def test_users() -> None:
    users = np.repeat([7, 3, 30], [5, 8, 9])
    labels = np.zeros(22, dtype=np.int64)
    part = partition("users", labels, seed=1, users=users)
    assert part.extras["users"].tolist() == [3, 7, 30]
    assert part.sizes.tolist() == [8, 5, 9]
    assert (users[part.indices(0)] == 3).all()
    chosen = {tuple(partition("users", labels, clients=2, seed=seed, users=users).extras["users"]) for seed in range(20)}
    assert chosen == {(3, 7), (3, 30), (7, 30)}
    with pytest.raises(ConfigError, match="clients = 4, but there are only 3 users"):
        partition("users", labels, clients=4, seed=1, users=users)
    with pytest.raises(ConfigError, match="no natural users"):
        partition("users", labels, seed=1)


def test_private_label_isolation() -> None:
    part = partition("private-label-isolation", CIFAR, clients=100, private_label=5, curious=17, seed=1)
    counts = part.label_counts(CIFAR, 10)
    assert set(part.sizes) == {500}
    assert counts[17, 5] == 0
    others = np.delete(counts, 17, axis=0)
    assert others[:, 5].sum() == 5000
    assert (np.delete(counts, 5, axis=1) > 0).all()
    assert (others > 0).all()
    assert chi2_contingency(others).pvalue > 1e-4
    assert dict(part.extras) == {"private_label": 5, "curious": 17}
    few = partition("private-label-isolation", CIFAR, clients=5, private_label=5, curious=0, seed=1).label_counts(CIFAR, 10)
    assert chi2_contingency(few[1:]).pvalue > 1e-4
    assert chi2_contingency(np.delete(few, 5, axis=1)).pvalue > 1e-4
    small = partition("private-label-isolation", CIFAR, clients=100, private_label=5, seed=1, examples_per_client=60)
    assert set(small.sizes) == {60}
    with pytest.raises(ConfigError, match="curious client's share of the public labels"):
        partition("private-label-isolation", np.repeat([0, 1], [5, 95]), clients=4, private_label=1, seed=1)


@pytest.mark.parametrize("share", [None, 0.25, 0.05])
def test_ladp_distribution_one(share: float | None) -> None:
    part = partition("ladp-1", CIFAR, private_label=9, curious=4, private_share=share, seed=1)
    counts = part.label_counts(CIFAR, 10)
    assert len(part) == 100
    assert len(set(part.sizes)) == 1
    assert np.count_nonzero(counts[4]) == 3
    assert counts[4, 9] == 0
    others = np.delete(counts, 4, axis=0)
    assert (np.count_nonzero(others, axis=1) == 4).all()
    size = int(part.sizes[0])
    assert (others[:, 9] == int(size * (0.1 if share is None else share))).all()
    public = others[:, :9]
    assert (public.max(axis=1) - np.where(public > 0, public, 10**6).min(axis=1) <= 1).all()
    held = np.count_nonzero(np.delete(counts, 9, axis=1), axis=0)
    assert held.sum() == 300
    assert np.ptp(held) <= 1
    assert (counts.sum(axis=0) <= 5000).all()
    with pytest.raises(ConfigError, match=f"it may be 4 to {size}"):
        partition("ladp-1", CIFAR, private_label=9, curious=4, private_share=share, seed=1, examples_per_client=size + 1)
    with pytest.raises(ConfigError, match=f"it may be 4 to {size}"):
        partition("ladp-1", CIFAR, private_label=9, curious=4, private_share=share, seed=1, examples_per_client=3)


def test_ladp_distribution_one_uses_nearly_all_data_and_takes_a_size() -> None:
    assert partition("ladp-1", CIFAR, private_label=9, seed=1).sizes.sum() > 0.97 * 50000
    assert set(partition("ladp-1", CIFAR, private_label=9, seed=1, examples_per_client=100).sizes) == {100}
    with pytest.raises(ConfigError, match="only 9 labels are public"):
        partition("ladp-1", CIFAR, private_label=9, labels_per_client=11, seed=1)
    with pytest.raises(ConfigError, match="too rare"):
        partition("ladp-1", np.repeat([0, 1, 2], [100, 100, 5]), clients=20, private_label=2, labels_per_client=2, seed=1)


def test_ladp_distribution_two() -> None:
    part = partition("ladp-2", CIFAR, private_label=9, curious=99, min_size=20, seed=1)
    counts = part.label_counts(CIFAR, 10)
    assert len(part) == 100
    assert counts[99, 9] == 0
    assert (counts.sum(axis=0) == 5000).all()
    assert part.sizes.min() == 20
    assert part.sizes.max() > 2000
    bare = partition("ladp-2", CIFAR, private_label=9, curious=99, min_size=0, seed=1)
    assert bare.sizes.min() == 0
    assert np.abs(bare.label_counts(CIFAR, 10) - counts).sum() <= 2 * 20 * 100
    even = partition("ladp-2", CIFAR, private_label=9, alpha=0.01, private_alpha=1000.0, seed=1).label_counts(CIFAR, 10)[1:, 9]
    assert np.abs(even - 5000 / 99).max() < 15


def test_the_curious_client_is_filled_up_with_public_labels_only() -> None:
    labels = np.repeat([0, 1], [40, 4000])
    for seed in range(10):
        part = partition("ladp-2", labels, clients=10, private_label=1, curious=3, min_size=10, seed=seed)
        assert (labels[part.indices(3)] == 0).all()
        assert part.sizes.min() >= 10
    with pytest.raises(ConfigError, match=r"client 3 cannot be given min_size = 41"):
        partition("ladp-2", labels, clients=10, private_label=1, curious=3, min_size=41, seed=1)


@pytest.mark.parametrize("kind", ["private-label-isolation", "ladp-1", "ladp-2"])
def test_curious_and_private_are_checked(kind: str) -> None:
    for wrong, message in (
        ({"private_label": 10}, "no example has private_label = 10"),
        ({"private_label": 1, "curious": 20}, "curious = 20; give a client from 0 to 19"),
        ({"private_label": 1, "clients": 1}, "there must be a curious client and at least one other"),
        ({}, "needs the option 'private_label'"),
    ):
        with pytest.raises(ConfigError, match=message):
            partition(kind, CIFAR, **{"clients": 20, "seed": 1, **wrong})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("ldap-1", {"clients": 3}, r"data\.partition\.kind = 'ldap-1': unknown partition \(did you mean 'ladp-1'\?\)"),
        ("iid", {}, "needs the option 'clients'"),
        ("iid", {"clients": 0}, "clients = 0 is not possible"),
        ("iid", {"clients": True}, "clients = True is not possible"),
        ("iid", {"clients": 2.0}, "clients = 2.0 is not possible"),
        ("iid", {"clients": 50001}, "need 50001 examples; there are 50000"),
        ("iid", {"clients": 1000, "examples_per_client": 51}, "need 51000 examples"),
        (
            "iid",
            {"clients": 2, "alpha": 1.0},
            r"partition\.alpha: iid has no option 'alpha'; it takes clients, examples_per_client",
        ),
        ("dirichlet", {"clients": 2, "alfa": 1.0}, "did you mean 'alpha'"),
        ("dirichlet", {"clients": 2, "alpha": 0.0}, "alpha = 0.0 is not possible"),
        ("dirichlet", {"clients": 2, "alpha": float("nan")}, "alpha = nan is not possible"),
        ("dirichlet", {"clients": 2, "alpha": float("inf")}, "alpha = inf is not possible"),
        ("dirichlet", {"clients": 2, "alpha": 1.0, "too_small": "ignore"}, "too_small = 'ignore' is not possible"),
        ("ladp-1", {"private_label": 1, "private_share": 1.0}, "private_share = 1.0 is not possible"),
    ],
)
def test_options_are_checked(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(kind, CIFAR, seed=1, **options)


def test_arguments_are_checked() -> None:
    for wrong, message in (
        ({"labels": np.zeros(4)}, "labels are float64"),
        ({"labels": np.zeros((4, 2), int)}, "labels are int64 of shape"),
        ({"labels": np.array([0, -1])}, "integers from 0"),
        ({"labels": np.zeros(0, int)}, "at least one"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"users": np.zeros(3, int)}, "they must agree"),
        ({"among": np.array([1, 1])}, "different indices"),
        ({"among": np.array([50000])}, "different indices"),
    ):
        with pytest.raises(ConfigError, match=message):
            partition("iid", **{"labels": CIFAR, "clients": 2, "seed": 1, **wrong})  # type: ignore[arg-type]


def test_options_of_a_configuration() -> None:
    """What a TOML table gives, through the discriminated union, is what the function gives."""
    adapter: TypeAdapter[Any] = TypeAdapter(AnyPartition)
    options = adapter.validate_python({"kind": "dirichlet", "clients": 20, "alpha": 1})
    part = from_options(options, CIFAR, seed=3)
    assert part.fingerprint() == partition("dirichlet", CIFAR, clients=20, alpha=1.0, seed=3).fingerprint()
    for kind, model in PARTITIONS.items():
        assert model.model_fields["kind"].default == kind


def test_options_of_a_table_are_checked_as_arguments_are() -> None:
    table = {"kind": "dirichlet", "clients": 20, "alpha": 0.5}
    part = from_options(checked_options(table), CIFAR, seed=3)
    assert part.fingerprint() == partition("dirichlet", CIFAR, clients=20, alpha=0.5, seed=3).fingerprint()
    assert table["kind"] == "dirichlet"
    assert checked_options({"clients": 4}) == PARTITIONS["iid"](clients=4)
    for wrong, message in (
        ({"kind": "dirichlet", "clients": 20, "alfa": 0.5}, "did you mean 'alpha'"),
        ({"kind": "idd", "clients": 20}, "did you mean 'iid'"),
        ({"kind": "dirichlet", "clients": 20}, "needs the option 'alpha'"),
    ):
        with pytest.raises(ConfigError, match=message):
            checked_options(wrong)


def test_isolation_refuses_what_the_public_labels_cannot_fill() -> None:
    labels = np.repeat([0, 1, 2], [40, 82, 40])
    with pytest.raises(ConfigError, match="need 81 examples; there are 80"):
        partition("private-label-isolation", labels, clients=2, seed=0, private_label=1)
