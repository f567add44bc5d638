"""How many examples a client has, as a configuration tells it, is what the run finds: with fewer, DP-SGD costs more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedveil as fv
from fedveil.data.catalogue import CATALOGUE, Info
from fedveil.data.dataset import Dataset
from fedveil.data.load import _OWN, register
from fedveil.data.sources.raw import RawData
from fedveil.errors import ConfigError
from fedveil.experiment.assembly import prepare
from fedveil.experiment.config import Config, configure
from fedveil.experiment.data_card import HandedOver, recorded
from fedveil.experiment.public_setting import population_of, setting_of
from fedveil.experiment.resolve import data_spec
from fedveil.experiment.run import run
from fedveil.experiment.verification import verification
from own_names import forgotten_after

PARTITIONS: list[dict[str, Any]] = [
    {"kind": "iid", "clients": 10},
    {"kind": "iid", "clients": 7, "examples_per_client": 41},
    {"kind": "dirichlet", "clients": 10, "alpha": 0.3},
    {"kind": "shards", "clients": 10},
    {"kind": "label-count", "clients": 10, "labels_per_client": 2},
    {"kind": "private-label-isolation", "clients": 10, "private_label": 3, "examples_per_client": 30},
    {"kind": "ladp-1", "clients": 10, "private_label": 3, "private_share": 0.5, "examples_per_client": 20},
    {"kind": "ladp-2", "clients": 10, "private_label": 3},
]


def by_record(partition: Mapping[str, Any], **data: Any) -> Config:
    return configure(
        data={"name": "digits", "partition": partition, **data},
        model="linear",
        method="dp-fedavg",
        training={"rounds": 2, "local": "dp-sgd", "batch_size": 5, "local_steps": 4, "example_clip": 1.0},
        privacy={"unit": "record", "view": "server", "delta": 1e-5, "noise_multiplier": 1.0},
    )


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: "-".join(map(str, p.values())))
@pytest.mark.parametrize("tests", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("public", [0.0, 0.25])
def test_a_configuration_knows_how_many_examples_a_client_has(partition: dict[str, Any], tests: float, public: float) -> None:
    config = by_record(partition, client_test_fraction=tests, public_fraction=public)
    told, found = population_of(config), prepare(data_spec(config)).population
    rounding = 0 if "examples_per_client" in partition else 1
    assert (told.clients, abs(told.records - found.records) <= rounding) == (found.clients, True), (told.records, found.records)


def people(of: int) -> Dataset:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40 * of, 4)).astype(np.float32), rng.integers(0, 2, 40 * of)
    return fv.from_arrays(x, y, client=np.repeat(np.arange(of), 40), test=(x[:4], y[:4]), classes=2, name="own")


def test_of_some_people_each_has_what_all_have_on_average() -> None:
    """The examples of all divided by those who take part made 400 of 40, and of an epsilon of 4.37 one of 0.57."""
    own = people(30)
    config = recorded(by_record({"kind": "users", "clients": 3}), HandedOver(own))
    assert population_of(config, own).records == prepare(data_spec(config), own).population.records == 40


def test_where_labels_decide_no_noise_is_promised_before_they_are_there(tmp_path: Path) -> None:
    config = by_record({"kind": "ladp-1", "clients": 10, "private_label": 3})
    with pytest.raises(ConfigError, match=r"examples_per_client: ladp-1 without it .* give it, or read the statement of the run"):
        fv.certify(config)
    result = run(config, tmp_path / "run")
    assert verification(tmp_path / "run").outcome == "verified"
    assert result.privacy.units < 10 * population_of(config, refuse_unknown=False).records


def unsized(name: str, local: str, method: Mapping[str, Any] | str = "dp-fedavg", **partition: Any) -> Config:
    return configure(
        data={"name": name, "partition": {"kind": "users", **partition}},
        model="linear",
        method=method,
        training={"rounds": 2, "local": local, "clients_per_round": 5},
        privacy={"unit": "record" if local == "dp-sgd" else "client", "view": "server", "delta": 1e-6, "epsilon": 8.0},
    )


def few_of(name: str) -> Dataset:
    """Thirty examples of each of 20 users, a third of them in the test split."""
    info, users = CATALOGUE[name], np.arange(600) % 20
    x, y = np.zeros((600, *info.input_shape), np.uint8 if name == "femnist" else np.float32), users % info.classes
    return Dataset(info, x[200:], y[200:], x[:200], y[:200], users[200:], users[:200])


@pytest.mark.parametrize("name", ["femnist", "harbox"])
def test_examples_that_only_the_files_tell_are_not_taken_for_one(name: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.partition\.clients: missing, and how many users .* depends on how its files"):
        fv.certify(unsized(name, "sgd"))
    assert fv.certify(unsized(name, "sgd", clients=20)).clients == 20, "at client level nothing follows from it"
    published = {"name": "nbafl", "variant": "published", "clip": 1.0}
    for config in (unsized(name, "dp-sgd", clients=20), unsized(name, "sgd", published, clients=20)):
        with pytest.raises(ConfigError, match=r"how many examples a client .*: hand the data over, as in fv\.certify"):
            fv.certify(config)
        assert fv.certify(config, data=few_of(name)).clients == 20, "as it says"
    told = unsized(name, "dp-sgd", kind="iid", clients=20, examples_per_client=100)
    assert fv.certify(told).units == 2000


def test_a_steps_bound_does_not_follow_from_examples_that_nobody_knows() -> None:
    noisy = {"name": "noisy-fedavg", "variant": "proven"}
    config = configure(
        data={"name": "harbox", "partition": {"kind": "users", "clients": 20}},
        model="linear",
        method=noisy,
        training={"rounds": 2},
        privacy={"delta": 1e-3, "epsilon": 8.0, "view": "final"},
    )
    steps = config.model_copy(update={"training": config.training.model_copy(update={"local_steps": 2})})
    with pytest.raises(ConfigError, match="how many examples a client has depends"):
        setting_of(config).steps  # noqa: B018 : K of the bound on its last model
    assert setting_of(steps).steps == 2


@pytest.fixture
def forgetful() -> Iterator[None]:
    with forgotten_after(CATALOGUE, _OWN):
        yield


def people_of(count: int) -> RawData:
    draw = np.random.default_rng(count)
    x, y, who = draw.normal(size=(20 * count, 4)).astype(np.float32), np.arange(20 * count) % 2, np.arange(20 * count) % count
    return RawData(x, y, x[:count], y[:count], who, who[:count])


@pytest.mark.few(1)
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(("users", "level"), [(30, "record"), (0, "record"), (0, "client")])
def test_a_copy_of_fewer_people_than_are_named_is_no_contradiction(users: int, level: str, tmp_path: Path) -> None:
    name = f"prepared-{users}-{level}"
    register(Info(name, "", (4,), 2, 0, 0, users, "made up", False, (0.0,) * 4, (1.0,) * 4, 1.0))(lambda _: people_of(10))
    config = by_record({"kind": "users"}) if level == "record" else configure(
        model="linear", method="dp-fedavg", training={"rounds": 2}, privacy={"delta": 1e-2, "noise_multiplier": 1.0}
    )  # fmt: skip
    config = config.model_copy(update={"data": config.data.model_copy(update={"name": name, "partition": {"kind": "users"}})})
    with pytest.raises(ConfigError, match=r"data\.partition\.clients: missing"):
        fv.certify(config)
    run(config, tmp_path / "run")
    assert verification(tmp_path / "run").outcome == "verified"


@pytest.mark.heavy
def test_a_run_of_natural_users_is_verified(data_dir: Path, tmp_path: Path) -> None:
    """UCI HAR is split anew by user and label, each part rounded: 277 examples each, where the configuration tells of 275."""
    config = by_record({"kind": "users"}, client_test_fraction=0.3, public_fraction=0.2)
    data = config.data.model_copy(update={"name": "uci-har", "data_dir": str(data_dir)})
    run(config.model_copy(update={"data": data}), tmp_path / "run")
    assert verification(tmp_path / "run").outcome == "verified"
