"""A run is recorded as what it was: what was trained on, and that a program handed it over; other data are refused later."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedveil.attacks.attack_options import AttackOptions
from fedveil.attacks.attack_run import attack
from fedveil.attacks.audit_run import audit_run
from fedveil.cli.app import app
from fedveil.data.dataset import Dataset
from fedveil.data.load import load
from fedveil.data.partition import ClientIndices, Partition, partition
from fedveil.errors import ConfigError
from fedveil.experiment.assembly import prepare
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import load_config
from fedveil.experiment.data_card import HandedOver
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.resolve import data_spec
from fedveil.experiment.result import Result
from fedveil.experiment.run import run
from fedveil.report.report import page_values, write_report
from fedveil.studies.twin import twin_sensitivity
from method_kit import digits

CONFIG = digits({"name": "dp-fedavg"}, clients=6, rounds=2, privacy={"epsilon": 8.0}, training={"clients_per_round": None})


def own(examples: int = 300) -> Dataset:
    """Data of one's own, of other normalisation than any in the catalogue."""
    full = load("digits")
    info = replace(full.info, name="wards", train_size=0, test_size=0, mean=(0.25,), std=(0.4,), source="hospital")
    return Dataset(info, full.x_train[:examples], full.y_train[:examples], full.x_test[:60], full.y_test[:60])


def uneven(data: Dataset, seed: int = 5) -> Partition:
    return partition("dirichlet", data.y_train, clients=6, seed=seed, alpha=1.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Result:
    data = own()
    return run(CONFIG, tmp_path_factory.mktemp("made") / "run", data=data, partition=uneven(data))


def both(data: Dataset | None = None) -> HandedOver:
    data = data or own()
    return HandedOver(data, uneven(data))


def card_of(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((path / "data.json").read_text())
    return value


def test_the_card_says_what_was_trained_on(made: Result) -> None:
    card = card_of(made.path)
    assert card["name"] == "wards"
    assert card["source"] == card["partition"]["source"] == "handed over by a program"
    assert card["examples"] == {"shape": [1, 8, 8], "dtype": "uint8", "vocabulary": 0}
    assert card["labels"] == {"shape": [], "dtype": "int64", "names": [], "unit": "", "classes": 10}
    assert (card["train_examples"], card["test_examples"], card["clients"]) == (300, 60, 6)
    assert card["nominal_examples_per_client"] == 50
    assert card["normalisation"] == {"scale": 255.0, "mean": [0.25], "std": [0.4]}
    assert card["partition"]["kind"] == "dirichlet"
    assert set(card["treated_as_public"]) == set(card) - {"format", "digests", "treated_as_public"}


def test_a_configured_run_has_a_card_too(tmp_path: Path) -> None:
    card = card_of(run(CONFIG, tmp_path / "run").path)
    assert card["source"].startswith("configured: scikit-learn")
    assert card["partition"] == {"source": "configured", "kind": "iid", "options": {"clients": 6}}
    assert load_config(tmp_path / "run" / "config.toml") == CONFIG


def test_the_digests_are_keyed_with_a_salt_that_stays_private(made: Result, tmp_path: Path) -> None:
    data = own()
    again = run(CONFIG, tmp_path / "run", data=data, partition=uneven(data))
    one, other = card_of(made.path)["digests"], card_of(again.path)["digests"]
    assert one["data"] != other["data"]
    assert one["partition"] != other["partition"]
    salt = (made.path / "private" / "salt").read_bytes()
    assert len(salt) == 32
    written = "".join(p.read_text(errors="replace") for p in made.path.iterdir() if p.is_file())
    assert salt.hex() not in written
    unkeyed = {hashlib.sha256(a.tobytes()).hexdigest() for a in (data.x_train, data.y_train)} | {uneven(data).fingerprint()}
    assert not [digest for digest in unkeyed if digest in written]


def test_the_configuration_names_no_other_data(made: Result) -> None:
    written = load_config(made.path / "config.toml")
    assert written.data.name == "wards"
    assert written.data.handed_over == ("data", "partition")
    assert written.data.partition == {"kind": "dirichlet", "clients": 6}
    assert "digits" not in (made.path / "config.toml").read_text()


def test_the_report_prints_no_command_that_would_run_something_else(made: Result, tmp_path: Path) -> None:
    (group,) = page_values([read_run(made.path)])["groups"]
    assert group["commands"] == []
    assert group["handed_over"]
    assert group["data"] == "wards"
    page = write_report([made.path], tmp_path / "report.html").read_text()
    assert f"fedveil run {made.path}" not in page


COMMANDS = [
    *(["run", "{}/config.toml"], ["certify", "{}/config.toml"], ["twin", "{}/config.toml"]),
    *(["audit", "{}"], ["audit", "{}", "--canaries", "2"], ["attack", "{}", "--kind", "labels"]),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_say_that_the_data_must_be_handed_over_again(command: list[str], made: Result) -> None:
    done = CliRunner().invoke(app, [part.format(made.path) for part in command])
    assert isinstance(done.exception, ConfigError)
    wanted = r"data.handed_over = .*handed the data and the partition of this run over.*in Python.*data=\.\.\., partition=\.\.\."
    assert re.search(wanted, str(done.exception)), done.exception


def test_audit_twin_and_attack_work_with_the_data_and_refuse_others(made: Result, tmp_path: Path) -> None:
    data = own()
    whole, other = both(data), own()
    other.x_train[7, 0, 0, 0] ^= 1
    assert audit_run(made.path, n=20, canaries=2, handed_over=whole).own.audits
    assert len(twin_sensitivity(made.path, 0, data=whole.data, partition=whole.partition)) == 2
    options = AttackOptions(images=1)
    found = attack(made.path, "labels", options, out=tmp_path / "attack", handed_over=whole)
    assert found.record["attacked"]["data"] == "wards"
    for changed, what in (
        (both(other), "other data than"),
        (HandedOver(data, uneven(data, seed=6)), "other partition than"),
    ):
        with pytest.raises(ConfigError, match=what):
            audit_run(made.path, n=20, handed_over=changed)
        with pytest.raises(ConfigError, match=what):
            twin_sensitivity(made.path, 0, data=changed.data, partition=changed.partition)
        with pytest.raises(ConfigError, match=what):
            attack(made.path, "labels", options, out=tmp_path / "attack", handed_over=changed)
    with pytest.raises(ConfigError, match="the partition of this run over"):
        attack(made.path, "labels", options, handed_over=HandedOver(data))


def test_what_was_configured_is_not_handed_over_afterwards(tmp_path: Path) -> None:
    path = run(CONFIG, tmp_path / "run").path
    with pytest.raises(ConfigError, match=r"data handed over, but the run in .* was made with nothing handed over"):
        twin_sensitivity(path, 0, data=own())


class Stopped(Exception):
    pass


def stop(record: dict[str, Any]) -> None:
    raise Stopped


def test_resuming_needs_the_same_data_again(tmp_path: Path) -> None:
    path, data, whole = tmp_path / "run", own(), both()
    with pytest.raises(Stopped):
        run(CONFIG, path, stop, data=data, partition=whole.partition)
    done = CliRunner().invoke(app, ["run", "--resume", str(path)])
    assert "handed the data and the partition of this run over" in str(done.exception)
    with pytest.raises(ConfigError, match="hand them over again in Python"):
        run(CONFIG, path, resume=True)
    changed = replace(data, y_train=np.roll(data.y_train, 1))
    with pytest.raises(ConfigError, match="other data than those of the run"):
        run(CONFIG, path, resume=True, data=changed, partition=whole.partition)
    result = run(CONFIG, path, resume=True, data=data, partition=whole.partition)
    assert len(result.history) == 2


def test_a_partition_that_gives_clients_public_examples_is_refused() -> None:
    public = CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update={"public_fraction": 0.2})})
    apart = prepare(data_spec(public))
    assert apart.public is not None
    again = prepare(data_spec(public), partition=apart.partition)
    assert again.public is not None
    assert again.public[0].equal(apart.public[0])
    with pytest.raises(
        ConfigError, match=r"gives clients 287 of the 287 examples that data\.public_fraction = 0\.2 makes public"
    ):
        prepare(data_spec(public), partition=prepare(data_spec(CONFIG)).partition)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order: order - 1437, "indices are 0 to 1436 for 1437 training examples"),
        (lambda order: order + 1, "indices are 0 to 1436"),
        (lambda order: np.where(order == 7, 8, order), "gives 1 examples a second time"),
        (lambda order: order.astype(np.float64), "indices are integers, got an array of float64"),
    ],
)
def test_a_partition_of_what_there_is_not_or_twice_is_refused(change: Callable[[Any], Any], message: str) -> None:
    """A negative index is an example under another name: by it a client could hold what is public, or what is another one's."""
    whole = prepare(data_spec(CONFIG)).partition
    indices = ClientIndices(change(whole.clients.order), whole.clients.offsets)
    for clients in (indices, list(indices)):
        with pytest.raises(ConfigError, match=message):
            prepare(data_spec(CONFIG), partition=replace(whole, clients=clients))


@pytest.mark.parametrize("names", [("data",), ("partition",)])
def test_one_of_the_two_handed_over(names: tuple[str, ...], tmp_path: Path) -> None:
    full = load("digits")
    handed_over: Any = {"data": own(), "partition": uneven(full)}
    path = run(CONFIG, tmp_path / "run", **{name: handed_over[name] for name in names}).path
    written: Config = load_config(path / "config.toml")
    assert written.data.handed_over == names
    assert written.data.name == ("wards" if names == ("data",) else "digits")
    assert written.data.partition["kind"] == ("iid" if names == ("data",) else "dirichlet")
    assert len(twin_sensitivity(path, 0, **{name: handed_over[name] for name in names})) == 2
