"""The history comes back from disk as it was written, every cell of its column's type and under its column's words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, configure
from fedveil.experiment.recorded_run import RunData, read_run
from fedveil.experiment.result import Result
from fedveil.experiment.run import run
from fedveil.experiment.run_directory import DECLARED
from fedveil.federation.history import Columns, declared
from fedveil.report.report import chart_values
from fedveil.tasks.classification import Classification
from fedveil.tasks.task import Column


def config(method: dict[str, Any], model: str = "linear") -> Config:
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 6}, "client_test_fraction": 0.2},
        model={"name": model},
        method=method,
        training={"rounds": 3, "evaluate_every": 2},
        privacy={"epsilon": 8.0, "delta": 0.01, "view": "server"},
        run={"engine": "inline", "seeded_noise": True},
    )


PUBLISHED = config({"name": "fedglp-adp", "variant": "published"})
METHODS = [
    PUBLISHED,
    config({"name": "fedglp-adp"}),
    config({"name": "fedanc"}),
    config({"name": "fedanc", "variant": "published"}),
    config({"name": "aldp-fl", "variant": "published"}),
    config({"name": "dp-fedavg"}),
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(PUBLISHED, tmp_path_factory.mktemp("published") / "run")


def test_every_number_comes_back_to_the_bit(published: Result) -> None:
    data = read_run(published.path)
    for row, read in zip(published.history, data.history, strict=True):
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        assert {k: v for k, v in read.items() if v is not None} == numbers
        assert isinstance(read["round"], int)
        assert all(isinstance(read[k], float) for k in numbers if k != "round")
    clips = [(row["round"], row["layer"], row["clip"]) for row in data.layers]
    names = ("fc1.weight", "fc1.bias")
    assert clips == [(r["round"], n, c) for r in published.history for n, c in zip(names, r["layer_clip"], strict=True)]
    own = [{k: v for k, v in row.items() if k != "round"} for row in data.participants]
    assert own == [cells for row in published.history for cells in row["by_client"]]
    accuracies = [(row["client"], row["accuracy"], row["personal"]) for row in data.clients if row["round"] == 2]
    last = published.history[2]
    assert accuracies == [
        (i, *pair) for i, pair in enumerate(zip(last["client_accuracy"], last["personal_accuracy"], strict=True))
    ]


@pytest.mark.parametrize("configuration", METHODS, ids=lambda c: f"{c.method.name}")
def test_every_column_of_a_method_is_declared_and_its_words_lie_beside_the_tables(configuration: Config, tmp_path: Path) -> None:
    data = read_run(run(configuration, tmp_path / "run").path)
    assert set(data.columns) <= set(data.declared)
    assert all(data.declared[name].title for name in data.columns)
    layers = {name for row in data.layers for name in row} - {"round", "layer"}
    assert all(data.declared.by_layer(name) in data.declared.values() for name in layers)
    assert (data.path / DECLARED).is_file() == bool(data.declared.own)


def test_an_own_column_is_public_only_if_a_policy_declares_it_and_no_objective_measures_it(published: Result) -> None:
    class Has:
        columns = (Column("beta", "Beta", public=True), Column("gamma", "Gamma"))

    class Nothing:
        pass

    def public(objective: object, policy: object) -> set[str]:
        return {name for name, column in declared(Classification(), objective, policy).items() if column.public} & {
            "beta",
            "gamma",
        }  # type: ignore[arg-type]

    assert public(Nothing(), Has()) == {"beta"}
    assert public(Has(), Nothing()) == public(Has(), Has()) == set()
    assert not declared(Classification(), Nothing(), Nothing())["anything"].public  # type: ignore[arg-type]
    assert not read_run(published.path).declared["mask_share"].public


def test_a_run_directory_without_declarations_still_reads_with_defaults(published: Result, tmp_path: Path) -> None:
    old = _copied(published.path, tmp_path / "old")
    (old / DECLARED).unlink()
    now, then = read_run(published.path), read_run(old)
    assert (then.history, then.layers, then.participants) == (now.history, now.layers, now.participants)
    assert then.declared["mask_share"] == Column("mask_share")
    assert not then.declared["mask_share"].public
    assert (then.declared["mask_share"].words, then.declared["mask_share"].axis) == ("Mask share", "mask share")


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("history.csv", "round,clip\n0,much\n", "clip is 'much', not a number"),
        ("history.csv", "round,clip\n0,1,2\n", "line 2 has more cells"),
        ("history.csv", "round,clip\n0.5,1\n", "invalid literal for int"),
        (DECLARED, '[{"title": "Clip"}]', "missing 1 required"),
        (DECLARED, '[{"name": "clip", "colour": "red"}]', "colour"),
    ],
)
def test_a_cell_of_another_type_is_an_error_that_names_the_file(
    name: str, text: str, what: str, published: Result, tmp_path: Path
) -> None:
    damaged = _copied(published.path, tmp_path / "damaged")
    (damaged / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"cannot read .*{name}.*{what}"):
        read_run(damaged)


def test_texts_keep_their_line_breaks(published: Result, tmp_path: Path) -> None:
    run = _copied(published.path, tmp_path / "run")
    (run / "private" / "failures.csv").write_text('round,client,failure\n0,1,"1e5"\n2,3,"first\nsecond, ""quoted"""\n')
    assert read_run(run).failures == [
        {"round": 0, "client": 1, "failure": "1e5"},
        {"round": 2, "client": 3, "failure": 'first\nsecond, "quoted"'},
    ]


def test_one_name_with_two_meanings_has_two_charts(published: Result) -> None:
    other = Columns([Column("beta", "Noise std / clip")])

    def group(name: str, data: RunData, columns: Columns) -> dict[str, Any]:
        words = {"title": columns["beta"].words, "axis": columns["beta"].axis, "share": columns["beta"].share, "private": False}
        return {"name": name, "columns": {"beta": words}, "charts": {}, "curves": {}, "clients": None, "partition": None}

    data = read_run(published.path)
    groups = [group("a", data, data.declared), group("b", data, other), group("c", data, other)]
    charts = chart_values(groups)["method"]
    assert [(c["title"], [s["group"] for s in c["series"]]) for c in charts] == [
        ("Most that a layer may keep personal", [0]),
        ("Noise std / clip", [1, 2]),
    ]


def _copied(path: Path, to: Path) -> Path:
    shutil.copytree(path, to, ignore=shutil.ignore_patterns("checkpoint", "ledger*"))
    assert json.loads((to / DECLARED).read_text())
    return to
