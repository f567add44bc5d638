"""From a DataFrame, or a file, to a verified run: recorded as what it was, resumed, audited and asked for again."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedveil as fv
from fedveil.attacks.audit_run import audit_run
from fedveil.cli.app import app
from fedveil.data.dataset import Dataset
from fedveil.errors import ConfigError, DataError
from fedveil.experiment.assembly import prepare
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import load_config
from fedveil.experiment.data_card import HandedOver, recorded
from fedveil.experiment.data_card import card as data_card
from fedveil.experiment.public_setting import population_of
from fedveil.experiment.recertify import recertify
from fedveil.experiment.resolve import data_spec
from fedveil.experiment.result import Result
from fedveil.report.report import write_report
from fedveil.studies.twin import twin_sensitivity

ROWS, PEOPLE = 600, 60


def frame() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    age, ward = draw.integers(20, 80, ROWS), draw.choice(["a", "b"], ROWS)
    cost = (age - 50) / 20 + np.where(ward == "a", 1.0, -1.0) + 0.1 * draw.normal(size=ROWS)
    return pd.DataFrame({"patient": np.arange(ROWS) % PEOPLE, "age": age, "ward": ward, "cost": cost})


FACTS: dict[str, Any] = {"categories": {"ward": ["a", "b"]}, "normalise": {"age": (50, 20)}, "unit": "EUR"}


def visits(**more: Any) -> Dataset:
    return fv.from_frame(frame(), target="cost", client="patient", name="visits", **{**FACTS, **more})  # type: ignore[no-any-return]


def config(**sections: Any) -> Config:
    rounds = {"rounds": 3, "clients_per_round": 20, "optimizer": {"lr": 0.05}}
    base: dict[str, Any] = {
        "task": "regression",
        "model": {"name": "linear"},
        "method": fv.DPFedAvg(clip=0.5),
        "training": rounds,
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "run": {"engine": "inline"},
    }
    return fv.configure(**{**base, **sections})  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fv.train(config(), tmp_path_factory.mktemp("own") / "run", data=visits())  # type: ignore[no-any-return]


def called(*command: str) -> str:
    done = CliRunner().invoke(app, list(command))
    assert done.exit_code == 0, done.output
    return done.output


def test_the_clients_of_the_column_are_those_of_the_run(made: Result) -> None:
    people = visits().info.users
    assert made.privacy.clients == people
    written = load_config(made.path / "config.toml").data
    assert (written.name, written.partition, written.handed_over) == ("visits", {"kind": "users"}, ("data",))
    other = prepare(data_spec(config(data={"partition": {"kind": "iid", "clients": 25}})), visits())
    assert (other.partition.kind, len(other.partition)) == ("iid", 25)
    assert prepare(data_spec(config()), visits()).population.clients == people


def test_the_statement_before_training_is_that_of_the_run(made: Result) -> None:
    assert fv.certify(config(), data=visits()) == made.privacy
    mixed = config(data={"partition": {"kind": "iid", "clients": 25}, "client_test_fraction": 0.3})
    for own in (visits(), visits(test=0.3), replace(visits(), users_test=np.zeros(visits().info.test_size, np.int64))):
        for one in (config(), mixed):
            before, after = population_of(one, own), prepare(data_spec(one), own).population
            assert (before.clients, before.records) == (after.clients, after.records)
    with pytest.raises(ConfigError, match=r"data.handed_over"):
        fv.certify(load_config(made.path / "config.toml"))


def test_hand_made_data_that_name_their_users_are_partitioned_by_them() -> None:
    own = visits()
    by_hand = Dataset(own.info, own.x_train, own.y_train, own.x_test, own.y_test, own.users_train)
    assert prepare(data_spec(config()), by_hand).partition.kind == "users"
    assert prepare(data_spec(config()), replace(by_hand, users_train=None)).partition.kind == "iid"


def test_data_of_the_catalogue_are_partitioned_as_ever() -> None:
    digits = fv.load("digits")
    named = replace(digits, users_train=np.arange(len(digits.x_train)) % 7)
    plain = fv.configure()
    assert prepare(data_spec(plain), named).partition.kind == "iid"


def test_the_card_says_what_was_done_to_them(made: Result) -> None:
    card = json.loads((made.path / "data.json").read_text())
    assert card["origin"] == {
        "source": "a table of pandas",
        "test": "whole clients, each with probability 0.2",
        "features": ["age", "ward=a", "ward=b"],
        "categories": {"ward": ["a", "b"]},
        "missing": {},
        "counted": [],
        "ranked": False,
        "timed": False,
        "indicators": [],
    }
    assert card["labels"] == {"shape": [], "dtype": "float32", "names": ["cost"], "unit": "EUR", "classes": 0}
    assert card["normalisation"] == {"scale": 1.0, "mean": [50.0, 0.0, 0.0], "std": [20.0, 1.0, 1.0]}
    assert "origin" in card["treated_as_public"]
    text = (made.path / "data.json").read_text()
    assert "patient" not in text
    assert any(line.startswith("the test set: ") for line in made.privacy.not_protected)


def test_the_card_does_not_tell_what_types_the_values_of_a_table_gave_it() -> None:
    """One age of 34.5 makes floats of a column that pandas took for integers."""
    cards = []
    for age in ("34", "34.5"):
        rows = "\n".join(f"{i % 9},{age if i == 4 else 20 + i},{i}" for i in range(90))
        read = pd.read_csv(io.StringIO(f"patient,age,cost\n{rows}\n"))
        spec = data_spec(config())
        card = data_card(spec, prepare(spec, fv.from_frame(read, target="cost", client="patient")), b"")
        cards.append({key: value for key, value in card.items() if key != "digests"})
    assert cards[0] == cards[1]


def test_a_frame_trains_verifies_and_is_reported(made: Result, tmp_path: Path) -> None:
    assert "contradicted" not in called("verify", str(made.path)).replace("0 contradicted", "")
    assert "visits" in write_report([made.path], tmp_path / "report.html").read_text()
    called("certify", str(made.path))


def test_it_is_audited_with_the_same_data_and_refuses_others(made: Result) -> None:
    assert audit_run(made.path, n=20, handed_over=HandedOver(visits())).own.audits
    assert len(twin_sensitivity(made.path, 0, data=visits())) == 3
    table = frame()
    table.loc[5, "cost"] += 1.0
    changed = fv.from_frame(table, target="cost", client="patient", name="visits", **FACTS)
    for other in (changed, visits(split_seed=1)):
        with pytest.raises(ConfigError, match="other data "):
            audit_run(made.path, n=20, handed_over=HandedOver(other))
    with pytest.raises(ConfigError, match="the data of this run over"):
        audit_run(made.path, n=20)


def test_it_resumes_with_the_same_data_only(tmp_path: Path) -> None:
    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fv.train(config(), tmp_path / "run", stop, data=visits())
    with pytest.raises(ConfigError, match="other data "):
        fv.train(config(), tmp_path / "run", data=visits(split_seed=1, test={"share": 0.2}), resume=True)
    assert len(fv.train(config(), tmp_path / "run", data=visits(), resume=True).history) == 3


def test_a_file_gives_the_run_that_the_frame_gives(made: Result, tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "visits.csv", index=False)
    own = visits()
    source = {"file": str(tmp_path / "visits.csv"), "target": "cost", "client": "patient", "features": ["age", "ward"], **FACTS}
    counts = {"clients": own.info.users, "train_examples": own.info.train_size}
    configured = config(data={"source": {**source, **counts}}, run={"seeded_noise": True, "engine": "inline"})
    handed = config(run={"seeded_noise": True, "engine": "inline"})
    one, other = fv.train(configured, tmp_path / "one"), fv.train(handed, tmp_path / "other", data=visits())
    assert one.model.vector.tolist() == other.model.vector.tolist()
    called("verify", str(tmp_path / "one"))
    assert load_config(tmp_path / "one" / "config.toml").data == configured.data
    assert json.loads((tmp_path / "one" / "data.json").read_text())["source"] == "configured: data of one's own"
    assert "epsilon" in called("certify", str(tmp_path / "one" / "config.toml"))
    assert len(twin_sensitivity(tmp_path / "one", 0)) == 3
    (tmp_path / "visits.csv").write_text((tmp_path / "visits.csv").read_text().replace(",a,", ",b,", 1))
    with pytest.raises(ConfigError, match="other data "):
        twin_sensitivity(tmp_path / "one", 0)
    (tmp_path / "visits.csv").unlink()
    for command in ("verify", "certify"):
        called(command, str(tmp_path / "one"))
    with pytest.raises(DataError, match="there is no file "):
        twin_sensitivity(tmp_path / "one", 0)


def test_a_table_of_which_no_data_set_was_made_is_refused(tmp_path: Path) -> None:
    config = fv.configure(model="linear", privacy={"epsilon": 8.0, "delta": 1e-3}, method=fv.DPFedAvg(clip=0.5))
    table: Any = frame()
    for use in (lambda: fv.certify(config, data=table), lambda: fv.train(config, tmp_path / "run", data=table)):
        with pytest.raises(ConfigError, match=r"data is a DataFrame: make a data set of it first, with fv\.from_frame"):
            use()
    assert not (tmp_path / "run").exists()


def test_data_that_are_handed_over_stand_in_the_place_of_those_configured() -> None:
    source, own = {"file": "visits.csv", "target": "cost", "client": "patient", "features": ["age"]}, visits()
    now = recorded(config(data={"source": source}), HandedOver(replace(own, info=replace(own.info, name="others")))).data
    assert (now.name, now.source, now.handed_over) == ("others", None, ("data",))


def test_the_statement_made_again_says_the_same_of_other_numbers_of_clients(made: Result, tmp_path: Path) -> None:
    """Recertification reads the card: with another number of clients on it the statement does not agree."""
    assert [finding.kind for finding in recertify(made.path)] == ["verified"]
    forged = tmp_path / "forged"
    shutil.copytree(made.path, forged)
    card = json.loads((forged / "data.json").read_text())
    (forged / "data.json").write_text(json.dumps({**card, "clients": card["clients"] * 10}))
    assert [finding.kind for finding in recertify(forged)] == ["contradicted"]


def test_records_are_not_split_by_rank(tmp_path: Path) -> None:
    day = frame().assign(day=np.arange(ROWS))
    keys: dict[str, Any] = {"target": "cost", "client": "patient", "name": "visits", **FACTS}
    ranked = fv.from_frame(day, **keys, test={"latest": "day", "share": 0.2})
    since = fv.from_frame(day, **keys, test={"latest": "day", "since": 500})
    records = config(
        privacy={"epsilon": 8.0, "delta": 1e-4, "unit": "record"}, training={"local": "dp-sgd", "clients_per_round": 20}
    )
    with pytest.raises(
        ConfigError, match=r"privacy.unit = 'record', and the test split .the last 0.2 of each client's examples by day"
    ):
        prepare(data_spec(records), ranked)
    assert len(prepare(data_spec(records), since).dataset.x_test) == 100
    assert len(prepare(data_spec(config()), ranked).dataset.x_test) == 120


@pytest.mark.parametrize("by", [{"share": 0.2}, {"since": 500}])
@pytest.mark.parametrize("unit", ["client", "record"])
def test_a_time_does_not_decide_which_examples_others_are_dealt(by: dict[str, Any], unit: str) -> None:
    """Without named clients the training examples are dealt out by their places: a record with a later time moves the others'."""
    x, times = np.zeros((ROWS, 3), np.float32), np.arange(ROWS)
    timed = fv.from_arrays(x, np.arange(ROWS) % 2, test={"latest": times, **by}, classes=2, name="own")
    training = {} if unit == "client" else {"local": "dp-sgd"}
    dealt = fv.configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 20}},
        model="linear",
        method={"name": "dp-fedavg"},
        training={"rounds": 1, **training},
        privacy={"epsilon": 8.0, "delta": 1e-4, "unit": unit},
    )
    with pytest.raises(ConfigError, match=r"ranks records by their times|so that one record's time decides which examples other"):
        prepare(data_spec(dealt), timed)
