"""How many examples a client has, as a configuration tells it, is what the run finds: with fewer, DP-SGD costs more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedveil as fv
from fedveil.configuration.config import Config, configure
from fedveil.configuration.public_setting import population_of
from fedveil.data.dataset import Dataset
from fedveil.errors import ConfigError
from fedveil.run.assembly import prepare
from fedveil.run.data_card import HandedOver, recorded
from fedveil.run.run import run
from fedveil.run.verification import verification

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
    told, found = population_of(config), prepare(config).population
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
    assert population_of(config, own).records == prepare(config, own).population.records == 40


def test_where_labels_decide_no_noise_is_promised_before_they_are_there(tmp_path: Path) -> None:
    config = by_record({"kind": "ladp-1", "clients": 10, "private_label": 3})
    with pytest.raises(ConfigError, match=r"examples_per_client: ladp-1 without it .* give it, or read the statement of the run"):
        fv.certify(config)
    result = run(config, tmp_path / "run")
    assert verification(tmp_path / "run").outcome == "verified"
    assert result.privacy.units < 10 * population_of(config, refuse_unknown=False).records


@pytest.mark.heavy
def test_a_run_of_natural_users_is_verified(data_dir: Path, tmp_path: Path) -> None:
    """UCI HAR is split anew by user and label, each part rounded: 277 examples each, where the configuration tells of 275."""
    config = by_record({"kind": "users"}, client_test_fraction=0.3, public_fraction=0.2)
    data = config.data.model_copy(update={"name": "uci-har", "data_dir": str(data_dir)})
    run(config.model_copy(update={"data": data}), tmp_path / "run")
    assert verification(tmp_path / "run").outcome == "verified"
