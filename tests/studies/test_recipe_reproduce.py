"""A recipe from start to end on embedded digits: ours beside theirs, missing rows, files, resuming, and each measurement."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedveil.cli import study_terminal
from fedveil.cli.app import app
from fedveil.data.load import load
from fedveil.errors import ConfigError, DataError
from fedveil.experiment.config import Config, configure
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.run import run
from fedveil.report.reproduce_figure import plot_reproduction
from fedveil.studies.cell import CellState
from fedveil.studies.reproduce import recipe_list
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.reproduce.recipe import COLLECTORS, Only, Recipe, RecipeEntry, RecipeRow, collected, kept, rows
from fedveil.studies.reproduce.recipe_files import job_of, load_recipe
from fedveil.studies.reproduce.recipe_jobs import RecipeListener
from fedveil.studies.reproduce.recipe_table import (
    as_markdown,
    body,
    chance_remarks,
    header,
    remarks,
    scale_text,
    seed_test_remarks,
    write_results,
)
from fedveil.studies.reproduce.reproduction import Reproduction, ReproductionSpec, RowOutcome, chance_of, reproduce
from fedveil.studies.statistics import holm, paired_t

TINY = """
title = "Accuracy by rate"
paper = "001"
table = "Table 0"
preset = "fedglp-adp/fashion-mnist"
notes = ["A note."]
published = [[50.5, "> 40", ""], ["60.0 ± 1.0", "", 1.5], [70.25, 1000, ""]]

[set]
"data" = { name = "digits", partition = { kind = "iid", clients = 4 } }
"model" = { name = "linear" }
"method" = { name = "fedavg" }
"privacy" = { view = "server" }
"training.optimizer" = { name = "sgd", lr = 0.5 }
"training.evaluate_every" = 1
"training.rounds" = 4
"training.batch_size" = 64

[[axes]]
name = "method"
entries = [
  { label = "FedAvg", note = "with a rate of its own" },
  { label = "slow", set = { "training.optimizer.lr" = 0.05 } },
  { label = "absent", missing = "fedveil does not have this method" },
]

[[columns]]
label = "accuracy (%)"
of = "test_accuracy"
times = 100

[[columns]]
label = "half way"
of = "test_accuracy"
round = 2
times = 100

[[columns]]
label = "times slow"
of = "test_accuracy"
relative = { method = "slow" }

[[stated]]
what = "something else"
value = 0.10

[small]
set = { "training.rounds" = 2 }
"""


class Notes(RecipeListener):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lacking, self.changes, self.measured = list[str](), list[CellState](), list[tuple[int, int, str]]()

    def planned(self, recipe: Recipe, configs: Sequence[Config], lacking: Mapping[str, str]) -> None:
        self.lacking = list(lacking)

    def changed(self, state: CellState, left: float | None) -> None:
        self.changes.append(state)

    def measuring(self, done: int, total: int, what: str) -> None:
        self.measured.append((done, total, what))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    file.write_text(TINY)
    return file


@pytest.fixture(scope="module")
def done(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    return reproduce(ReproductionSpec(recipe), tmp_path_factory.mktemp("out"), jobs=1)


def test_ours_stand_beside_theirs(done: Reproduction) -> None:
    first, slow, absent = done.outcomes
    for outcome in (first, slow):
        history = read_run(outcome.folders[0]).history
        assert len(history) == 2
        assert outcome.mean(0) == pytest.approx(100 * float(history[-1]["test_accuracy"]))
        assert outcome.mean(1) == pytest.approx(100 * float(history[0]["test_accuracy"]))  # round 2 of 4 is round 1 of 2
    assert first.difference(0) == pytest.approx(first.mean(0) - 50.5)  # type: ignore[operator]
    assert slow.difference(0) == pytest.approx(slow.mean(0) - 60.0)  # type: ignore[operator]
    assert first.difference(1) is None
    assert slow.mean(2) == 1.0
    assert slow.difference(2) == -0.5
    assert first.mean(2) == pytest.approx(first.mean(0) / slow.mean(0))  # type: ignore[operator]
    assert absent.mean(0) is None
    assert absent.problem == "fedveil does not have this method"


def test_the_table_shows_everything_and_says_its_scale(done: Reproduction) -> None:
    assert header(done) == ["method", "column", "paper", "ours", "difference"]
    table = body(done)
    ours = done.outcomes[0].mean(0)
    assert ours is not None
    assert table[0] == ["FedAvg", "accuracy (%)", "50.5", f"{ours:.4g}", f"{ours - 50.5:+.4g}"]
    assert table[1][2] == "> 40"
    assert table[1][4] == ""
    assert table[4][2] == ""
    assert table[6] == ["absent", "accuracy (%)", "70.25", "[1]", ""]
    assert table[7][2] == "1,000"
    assert len(table) == 8
    assert remarks(done) == [
        "[1] fedveil does not have this method.",
        "A note.",
        "FedAvg: with a rate of its own.",
        "The paper also states: something else: 0.10.",
    ]
    assert "SMALL, not the paper's (1 seed): training.rounds = 2." in scale_text(done)
    assert "| absent | half way | 1,000 | [1] |  |" in as_markdown(done)


def at(labels: tuple[str, ...], *values: float, chance: float | None = 0.1) -> RowOutcome:
    row = RecipeRow(tuple(RecipeEntry(label=label) for label in labels), (None,))
    return RowOutcome(row, (values,), ("",), chance=chance)


def made(*outcomes: RowOutcome, seeds: int = 1, of: str = "test_accuracy") -> Reproduction:
    axes = [{"name": "epsilon", "entries": [{"label": "2"}, {"label": "8"}]}]
    axes += [{"name": "method", "entries": [{"label": name} for name in ("A", "B", "C")]}]
    column = {"label": "accuracy (%)", "of": of, "times": 100}
    recipe = Recipe.model_validate({"title": "t", "paper": "001", "table": "T", "axes": axes, "columns": [column]})
    return Reproduction("r", recipe, "small", seeds, (), {}, outcomes, 0, Path("r"))


def test_arms_at_chance_are_said_to_be() -> None:
    rows_ = (at(("2", "A"), 9.8), at(("2", "B"), 14.0), at(("8", "A"), 40.0), at(("8", "B"), 1.2, chance=0.01))
    assert chance_remarks(made(*rows_)) == [
        "Both arms are at chance (accuracy (%): 2, A 9.8; 2, B 14, against 10 by guessing): their difference says nothing."
    ]
    assert remarks(made(*rows_))[0].startswith("Both arms are at chance")
    assert chance_remarks(made(rows_[0], rows_[2])) == [], "one of them learned"
    assert chance_remarks(made(*rows_, of="train_loss")) == []
    assert chance_remarks(made(*rows_, at(("8", "C"), 10.0)))[0].startswith("3 arms are at chance")
    uneven = (at(("2", "A"), 66.7, chance=2 / 3), at(("2", "B"), 68.0, chance=2 / 3), at(("8", "A"), 70.0, chance=2 / 3))
    assert chance_remarks(made(*uneven)) == [
        "Both arms are at chance (accuracy (%): 2, A 66.7; 2, B 68, against 66.7 by guessing): their difference says nothing."
    ]


def test_guessing_takes_the_commonest_class() -> None:
    assert chance_of("digits") == np.bincount(load("digits").y_test).max() / 360
    assert chance_of("no such data") is None
    assert chance_of("tinyimagenet", "/nowhere") == 1 / 200, "not here"


def test_methods_are_compared_over_seeds_never_over_rounds() -> None:
    block = (at(("2", "A"), 60, 61, 62), at(("2", "B"), 50, 52, 51), at(("2", "C"), 59, 61, 62.5))
    found = seed_test_remarks(made(*block, at(("8", "A"), 60.0, 61.0, 61.5), seeds=3))
    assert len(found) == 2, "the block at epsilon 8 has one row only"
    p = holm([paired_t([-10, -9, -11]), paired_t([-1, 0, 0.5])])
    assert found[0] == f"2: A has the largest mean; less that: B -10 (p = {p[0]:.2g}); C -0.167 (p = {p[1]:.2g}, not shown)."
    assert "paired t-tests by seed (3 seeds)" in found[1]
    assert "only large differences show" in found[1]
    assert seed_test_remarks(made(*block)) == [], "one seed is no sample"
    b = seed_test_remarks(replace(made(*block, seeds=3), against="B"))
    p = holm([paired_t([10, 9, 11]), paired_t([9, 9, 11.5])])
    assert b[0] == f"2: B; less that: A +10 (p = {p[0]:.2g}); C +9.83 (p = {p[1]:.2g})."
    lacking = made(*block, at(("8", "A"), 60.0, 61.0, 61.5), at(("8", "C"), 60.0, 62.0, 61.5), seeds=3)
    assert seed_test_remarks(replace(lacking, against="B"))[1] == (
        "8: B has no numbers of several seeds, so nothing is compared with it."
    )
    settled = (at(("2", "A"), 0.4, 0.4, 0.4), at(("2", "B"), 0.3, 0.3, 0.3))
    assert seed_test_remarks(made(*settled, seeds=3)) == [], "the settings decide these figures"


def test_the_method_that_others_are_compared_with_must_be_among_the_rows(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--against slow: tests are over seeds, of which there is one; give --seeds 2 or more"):
        ReproductionSpec(recipe, against="slow")
    for label, near in (("slo", "did you mean 'slow'"), ("absent", "there are FedAvg, slow")):
        with pytest.raises(ConfigError, match=f"--against {label}: unknown method among the rows that are run.*{near}"):
            reproduce(ReproductionSpec(recipe, seeds=2, against=label), tmp_path)
    with pytest.raises(ConfigError, match="--against x: this table compares no methods; its axes are schedule"):
        reproduce(ReproductionSpec("noisy-fedavg/table-9", seeds=2, against="x"), tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is run first"
    out = ["--out", str(tmp_path), "--seeds", "2", "--only", "method=FedAvg", "--only", "method=slow", "--jobs", "1"]
    result = CliRunner().invoke(app, ["reproduce", str(recipe), *out, "--against", "slow"])
    assert result.exit_code == 0, result.output
    assert "slow (accuracy (%)); less that: FedAvg +" in " ".join(result.output.split())


def test_bits_that_were_not_sent(tmp_path: Path) -> None:
    config = configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 4}},
        model={"name": "linear"},
        method={"name": "fedglp-adp", "variant": "published", "slope": 0.0, "growth": 0.1},
        training={"rounds": 3, "local_steps": 2, "optimizer": {"name": "adam", "lr": 0.01}},
        privacy={"epsilon": 8.0, "delta": 0.01, "view": "server"},
        run={"engine": "inline"},
    )
    path = run(config, tmp_path / "run").path
    sent = sum(650 - int(0.1 * t * 650) for t in range(3))
    assert MEASURES["uplink"].series(config, path, tmp_path) == {"saved": [(1, 1 - (32 * sent + 3 * 650) / (32 * 650 * 3))]}


def test_files_and_picture(done: Reproduction) -> None:
    folder = write_results(done)
    saved = json.loads((folder / "result.json").read_text())
    assert saved["scale"] == "small"
    assert saved["rows"][0]["values"][0]["ours"] == done.outcomes[0].mean(0)
    assert saved["rows"][2]["problem"]
    with (folder / "result.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == ["FedAvg"] * 3 + ["slow"] * 3 + ["absent"] * 2
    assert float(lines[0]["difference"]) == done.outcomes[0].difference(0)
    assert lines[6]["problem"] == "fedveil does not have this method"
    picture = plot_reproduction(done)
    assert picture is not None
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_what_is_done_is_not_done_again(recipe: Path, done: Reproduction) -> None:
    root = Path(done.outcomes[0].folders[0]).parents[2]
    before = {p: p.stat().st_mtime_ns for p in root.glob("runs/cells/*/summary.json")}
    assert len(before) == 2
    notes = Notes()
    again = reproduce(ReproductionSpec(recipe), root, listener=notes)
    assert again.outcomes == done.outcomes
    assert notes.changes == []
    assert notes.measured == [(0, 2, "run of fedavg"), (1, 2, "run of fedavg")]
    assert {p: p.stat().st_mtime_ns for p in root.glob("runs/cells/*/summary.json")} == before
    two = reproduce(ReproductionSpec(recipe, seeds=2, overrides=["training.optimizer.lr=0.5"]), root, jobs=1)
    values = two.outcomes[0].values[0]
    assert len(values) == 2
    assert values[0] == pytest.approx(done.outcomes[0].mean(0))  # the same configuration, so the same run
    assert two.outcomes[1].folders == two.outcomes[0].folders
    assert len(list(root.glob("runs/cells/*/summary.json"))) == 3
    assert "±" in body(two)[0][3]
    assert "Settings of the user: training.optimizer.lr=0.5" in scale_text(two)


@pytest.mark.parametrize("measure", ["statement", pytest.param("run", marks=pytest.mark.slow)])
def test_a_row_that_fails_says_why_and_stops_no_other(tmp_path: Path, measure: str) -> None:
    file = tmp_path / "r.toml"
    text = TINY.replace("[set]", f'measure = {{ name = "{measure}" }}\n[set]', 1).replace("test_accuracy", "proven_epsilon")
    reason = 'missing = "fedveil does not have this method"'
    file.write_text(text.replace(reason, 'set = { "method" = { name = "dp-fedavg" } }'))
    done = reproduce(ReproductionSpec(file), tmp_path / "out", jobs=1)
    assert "privacy.epsilon or privacy.noise_multiplier" in done.outcomes[2].problems[0]
    assert done.outcomes[2].mean(0) is None
    if measure == "statement":
        assert done.outcomes[0].mean(0) == math.inf
    else:
        assert done.outcomes[0].problems[0] == "this run has no proven_epsilon"


@pytest.mark.slow
def test_measurements_side_by_side_give_what_one_after_the_other_gives(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    text = TINY.replace("[set]", 'measure = { name = "twin" }\n[set]', 1).replace("test_accuracy", "sensitivity")
    reason = 'missing = "fedveil does not have this method"'
    file.write_text(text.replace(reason, 'set = { "method" = { name = "dp-fedavg" } }'))
    side_by_side = reproduce(ReproductionSpec(file), tmp_path / "two", jobs=2)
    one_by_one = reproduce(ReproductionSpec(file), tmp_path / "one", jobs=1)
    assert side_by_side.outcomes[0].mean(0) == one_by_one.outcomes[0].mean(0) != side_by_side.outcomes[1].mean(0)
    assert side_by_side.outcomes[2].problems == one_by_one.outcomes[2].problems
    assert side_by_side.outcomes[2].problems[0].startswith("failed: ")
    assert (tmp_path / "two" / "measured" / "workers.log").exists()


def test_absent_data_are_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    file = tmp_path / "r.toml"
    file.write_text(TINY.replace('name = "digits"', 'name = "femnist"'))
    with pytest.raises(DataError, match="no copy of femnist"):
        reproduce(ReproductionSpec(file), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    mixed = TINY.replace('label = "slow", set = { ', 'label = "slow", set = { "data.name" = "femnist", ')
    mixed = mixed.replace("[set]", 'measure = { name = "partition" }\n[set]', 1).replace("test_accuracy", "labels_others")
    file.write_text(mixed)
    notes = Notes()
    done = reproduce(ReproductionSpec(file), tmp_path / "out", listener=notes)
    assert notes.lacking == ["femnist"]
    assert done.outcomes[1].problem == "the data set femnist is not here"
    assert done.outcomes[0].mean(0) == 1000


def test_the_program_runs_a_recipe_and_refuses_nonsense(recipe: Path, done: Reproduction) -> None:
    root = Path(done.outcomes[0].folders[0]).parents[2]
    shown = CliRunner().invoke(app, ["reproduce", str(recipe), "--out", str(root)], env={"COLUMNS": "140"})
    assert shown.exit_code == 0, shown.output
    assert "FedGLP-ADP, Table 0: Accuracy by rate" in shown.output
    assert "70.25" in shown.output
    assert "SMALL" in shown.output
    for words, problem in ((["--scale", "big"], "--scale big"), (["--seeds", "0"], "--seeds 0")):
        refused = CliRunner().invoke(app, ["reproduce", str(recipe), *words])
        assert refused.exit_code != 0
        assert problem.split()[0] in refused.output + str(refused.exception)


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A paper of three tables: data that nobody has, a table that is quickly made, and one with another axis."""
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    quick = TINY.replace("[set]", 'measure = { name = "partition" }\n[set]', 1).replace("test_accuracy", "labels_others")
    texts = {
        "a": TINY.replace('name = "digits"', 'name = "femnist"'),
        "b": quick,
        "c": quick.replace('name = "method"', 'name = "rate"'),
    }
    files = [tmp_path / f"{name}.toml" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text.replace("{ method =", "{ rate =") if file.stem == "c" else text)
    monkeypatch.setattr(recipe_list, "recipes_of", lambda name: [str(file) for file in files])
    return [str(file) for file in files]


def test_a_paper_goes_on_without_a_table_whose_data_are_missing(paper: list[str], tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["reproduce", "any", "--out", str(tmp_path / "out")])
    assert ran.exit_code == 1, ran.output
    assert f"{paper[0]} is not run: no copy of femnist" in ran.stderr
    assert f"2 of 3 recipes are run. These lack their data: {paper[0]}" in ran.stderr
    assert sorted(file.parts[-3] for file in (tmp_path / "out").glob("*/small/result.json")) == ["b", "c"]


def test_a_label_that_one_table_of_a_paper_lacks_is_refused_before_any_is_run(paper: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.toml: --only method: unknown axis"):
        CliRunner().invoke(
            app, ["reproduce", "any", "--only", "method=FedAvg", "--out", str(tmp_path / "out")], catch_exceptions=False
        )
    assert not (tmp_path / "out").exists()


def test_an_interrupted_paper_says_how_to_go_on(paper: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(study_terminal, "reproduce", stopped)
        ended = CliRunner().invoke(app, ["reproduce", "any", "--out", str(tmp_path / "out")])
    assert ended.exit_code == 130
    assert f"interrupted in {paper[0]}; the same command goes on where it was (--out {tmp_path / 'out'})" in ended.stderr


def test_chosen_rows_alone_are_run(recipe: Path, tmp_path: Path) -> None:
    done = reproduce(ReproductionSpec(recipe, only={"method": ["FedAvg", "absent"]}), tmp_path, jobs=1)
    assert [outcome.row.labels for outcome in done.outcomes] == [("FedAvg",), ("absent",)]
    assert len(list((tmp_path / "runs" / "cells").iterdir())) == 1
    assert "Only method: FedAvg, absent: 1 further rows" in scale_text(done)
    assert done.outcomes[0].values[2] == ()
    assert done.outcomes[0].problems[2] == "it is relative to the row slow, which is not among those chosen"
    assert json.loads((write_results(done) / "result.json").read_text())["only"] == {"method": ["FedAvg", "absent"]}
    assert done.folder == tmp_path / "tiny" / "small-only"


def test_a_chosen_label_need_not_be_one_of_the_small_scale() -> None:
    table = load_recipe("fedglp-adp/table-1")
    only: Only = {"epsilon": ["4"], "dataset": ["SVHN"]}
    assert [row.labels[2] for row in rows(table) if kept(table, row, "small", only)] == ["4"] * 5


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("method", "--only method: axis=label is expected"),
        ("metod=slow", "--only metod: unknown axis of this table (did you mean 'method'?); there are method"),
        ("method=slov", '--only method=slov: no row has this label (did you mean \'slow\'?); there are "FedAvg", "slow", '),
    ],
)
def test_rows_that_there_are_not_are_refused(recipe: Path, tmp_path: Path, only: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        CliRunner().invoke(app, ["reproduce", str(recipe), "--only", only, "--out", str(tmp_path)], catch_exceptions=False)


def test_the_program_lists_all_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    listed = CliRunner().invoke(app, ["reproduce", "--json"])
    assert listed.exit_code == 0, listed.output
    found = {one["recipe"]: one for one in json.loads(listed.stdout)}
    assert len(found) == 52
    table = found["ladp-fl/table-2"]
    assert (table["runnable"], table["missing"], table["small_rows"]) == (56, 0, 28)
    assert set(table["data"]) == {"cifar10", "cifar100"}
    assert table["reasons"] == {}
    lacking = found["ladp-fl/table-8"]
    assert (lacking["runnable"], lacking["missing"], list(lacking["reasons"].values())) == (0, 15, [15])
    assert lacking["small"] == ""
    assert (found["ladp-fl/table-10"]["runnable"], found["ladp-fl/table-10"]["small_rows"]) == (26, 14)
    assert all(one["full"].startswith("about ") for one in found.values() if one["runnable"])


def test_a_column_that_cannot_be_had_keeps_the_papers_values(done: Reproduction, tmp_path: Path) -> None:
    file = tmp_path / "lacking.toml"
    file.write_text(TINY.replace('relative = { method = "slow" }', 'missing = "its network is not here"'))
    again = reproduce(ReproductionSpec(file), Path(done.outcomes[0].folders[0]).parents[2], jobs=1)
    slow = again.outcomes[1]
    assert (slow.mean(2), slow.problems[2], slow.row.published[2]) == (None, "its network is not here", 1.5)
    assert slow.mean(0) == done.outcomes[1].mean(0)
    assert "[1] its network is not here." in remarks(again)
    file.write_text(TINY.replace('of = "test_accuracy"\nrelative', "relative"))
    with pytest.raises(ConfigError, match="say what it is `of`, or why it or the recipe is missing"):
        load_recipe(file)


def test_collectors() -> None:
    measured = {"a": [(1, 3.0), (2, 5.0), (4, 1.0)]}
    wanted = {"last": 1.0, "best": 5.0, "mean": 3.0, "median": 3.0, "sum": 9.0, "spread": math.sqrt(8 / 3)}
    assert {name: collected(measured, "a", name) for name in COLLECTORS} == pytest.approx(wanted)
    assert collected(measured, "a", "last", upto=3) == 5.0
    assert collected(measured, "b", "last") == "this run has no b"
    assert collected(measured, "a", "last", upto=0) == "nothing was measured up to round 0"


# --- measurements -------------------------------------------------------------------------------------------------------


def digits(recipe: Path, **sections: dict[str, Any]) -> Config:
    """The first row's configuration, with changes."""
    config = job_of(load_recipe(recipe), rows(load_recipe(recipe))[0], "small").config
    return Config.model_validate({**config.model_dump(), **{k: {**config.model_dump()[k], **v} for k, v in sections.items()}})


def measured(name: str, config: Config, path: Path, folder: Path, **options: Any) -> dict[str, float]:
    measure = MEASURES[name]
    series = measure.series(config, path if measure.trains else None, folder, **measure.checked({"name": name, **options}))
    return {key: points[-1][1] for key, points in series.items() if points}


def test_measurements_that_need_no_training(recipe: Path, tmp_path: Path) -> None:
    isolated = {"partition": {"kind": "private-label-isolation", "clients": 4, "private_label": 5}}
    counts = measured("partition", digits(recipe, data=isolated), tmp_path, tmp_path)
    assert (counts["labels_others"], counts["labels_curious"]) == (10, 9)
    assert counts["examples_least"] <= counts["examples_curious"] <= counts["examples_most"]
    own = {"method": {"name": "dp-fedavg"}, "privacy": {"noise_multiplier": 1.0, "view": "aggregate"}}
    assert measured("statement", digits(recipe, **own), tmp_path, tmp_path)["proven_epsilon"] > 0
    twin = measured("twin", digits(recipe), tmp_path, tmp_path, change="absent")
    assert twin["sensitivity"] > 0
    assert twin["test_accuracy"] > 0.2


def test_reconstruction_from_the_upload_of_the_configured_mechanism(recipe: Path, tmp_path: Path) -> None:
    network = {"model": {"name": "mlp", "hidden": [16]}}
    options: dict[str, Any] = {"attack": "ig", "images": 2, "settings": {"steps": 150}}
    plain = measured("inversion", digits(recipe, **network), tmp_path, tmp_path, **options)
    assert "ssim" not in plain  # 8 x 8 is too small for its window
    assert plain["l2"] == pytest.approx(8 * math.sqrt(plain["mse"]), rel=0.5)
    assert (tmp_path / "reconstruction.png").stat().st_size > 1000
    noisy = {**network, "method": {"name": "dp-fedavg", "clip": 1.0}, "privacy": {"noise_multiplier": 5.0, "view": "server"}}
    hidden = measured("inversion", digits(recipe, **noisy), tmp_path, tmp_path, **options)
    assert hidden["psnr"] < plain["psnr"] - 3
    summed = {**noisy, "privacy": {"noise_multiplier": 5.0, "view": "aggregate"}}
    with pytest.raises(ConfigError, match=r"Set privacy\.view = 'server'"):
        measured("inversion", digits(recipe, **summed), tmp_path, tmp_path, **options)


def test_attacks_on_a_finished_run(recipe: Path, tmp_path: Path) -> None:
    config = digits(recipe, training={"rounds": 6, "local_epochs": 2})
    path = run(config, tmp_path / "run").path
    final = float(read_run(path).history[-1]["test_accuracy"])
    labels = measured("labels-after", config, path, tmp_path, images=360)
    assert labels["accuracy"] == pytest.approx(final)
    extracted = measured("extraction-after", config, path, tmp_path, queries=300, epochs=20)
    assert 0.3 < extracted["student"] <= 1
    with pytest.raises(ConfigError, match="leave none of the 360"):
        measured("extraction-after", config, path, tmp_path, queries=360)
    with pytest.raises(ConfigError, match="cifar10"):
        measured("attribute-after", config, path, tmp_path)
    shards = {"partition": {"kind": "shards", "clients": 10, "per_client": 1}}
    apart = digits(recipe, data=shards, training={"rounds": 2})
    path = run(apart, tmp_path / "apart").path
    found = measured("clients-after", apart, path, tmp_path, targets=5, probes=10)
    assert found["matched"] >= 0.8
    assert found["chance"] == 0.1
