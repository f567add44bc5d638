"""A comparison from start to end: rows, files, extension, refusals."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View, at_most
from fedveil.cli.app import app
from fedveil.cli.study_terminal import LiveTable
from fedveil.cli.study_terminal import render_comparison as render
from fedveil.errors import ConfigError
from fedveil.experiment.config import parse
from fedveil.experiment.run import run
from fedveil.experiment.run_directory import write_config
from fedveil.federation.history import Columns
from fedveil.report.compare_page import check_runs, markdown, write_files
from fedveil.statement.statement import Assumption, Statement
from fedveil.statement.statement_text import Item
from fedveil.studies.cell import CellState
from fedveil.studies.compare.comparison import Comparison, compare, default_out
from fedveil.studies.compare.comparison_plan import ComparisonListener, ComparisonSpec, Planned, seeds_from
from fedveil.studies.compare.comparison_rows import (
    Row,
    _placed,
    _row,
    assumptions_of,
    blocks,
    promise_sentences,
    proven,
    rows_of,
    short_names,
    verdict,
)
from fedveil.tasks.task import Column
from grid_cells import small

ACCURACY = Columns().main
METHODS = ("fedavg", "dp-fedavg", "dp-fedavg:clip=0.01", "noisy-fedavg")
EPSILONS = (2.0, 8.0)
SEEDS = range(5, 8)


class Notes(ComparisonListener):
    """Keeps what it is told, and the live table of it."""

    def __init__(self) -> None:
        self.rows, self.checked, self.changes = list[Planned](), list[str](), list[CellState]()

    def checking(self, what: str) -> None:
        self.checked.append(what)

    def planned(self, rows: Sequence[Planned]) -> None:
        self.rows = list(rows)

    def started(self, states: Sequence[CellState]) -> None:
        self.table = LiveTable(self.rows, states)

    def changed(self, state: CellState, left: float | None) -> None:
        self.table.change(state, left)
        self.changes.append(state)


def row(found: Comparison, method: str, epsilon: float) -> Row:
    return next(r for r in found.rows if (r.method, r.epsilon) == (method, epsilon))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    spec = ComparisonSpec(small(seed=5, rounds=2), METHODS, EPSILONS, SEEDS)
    return compare(spec, tmp_path_factory.mktemp("compare") / "a", jobs=2)


def test_rows_are_what_single_runs_give(found: Comparison, tmp_path: Path) -> None:
    reached = row(found, "dp-fedavg:clip=0.01", 8.0)
    assert sorted(reached.values) == [5, 6, 7]
    config = small(seed=6, rounds=2, clip=0.01)
    assert run(config, tmp_path / "alone").accuracy == reached.values[6]
    for r in found.rows:
        if r.values:
            assert r.mean == pytest.approx(fmean(r.values.values()))
            assert r.sd == pytest.approx(stdev(r.values.values()))
        for state in r.states:
            assert state.statement is not None
            assert state.statement.proven.epsilon <= r.epsilon * (1 + 1e-6)


def test_ranks_and_tests_within_a_guarantee(found: Comparison) -> None:
    for (_, epsilon), block in found.blocks.items():
        ranked = [r for r in block if r.rank is not None]
        if math.isinf(epsilon):
            assert [(r.method, r.rank, r.against) for r in block] == [("fedavg", None, None)]
            continue
        assert [r.rank for r in ranked] == [1, 2]
        best, other = ranked
        assert best.mean > other.mean
        assert best.against is None
        assert other.against is not None
        pairs = [(other.values[s], best.values[s]) for s in (5, 6, 7)]
        theirs = float(stats.ttest_rel([a for a, _ in pairs], [b for _, b in pairs]).pvalue)
        assert other.against.holm == pytest.approx(theirs, rel=1e-9)
        ranked_signs = float(stats.wilcoxon([a - b for a, b in pairs], method="exact").pvalue)
        assert (other.against.n, other.against.wilcoxon) == (3, pytest.approx(ranked_signs, rel=1e-9))


def test_blocks_come_by_partition_then_epsilon() -> None:
    rows = [Row("m", p, e, ACCURACY, 0) for e in (math.inf, 8.0, 2.0) for p in ("b", "a")]
    assert list(blocks(rows)) == [(p, e) for p in ("b", "a") for e in (2.0, 8.0, math.inf)]


def test_a_method_that_cannot_be_run_is_a_row_with_its_reason(found: Comparison) -> None:
    for epsilon in EPSILONS:
        missing = row(found, "noisy-fedavg", epsilon)
        assert (missing.values, missing.rank, missing.states) == ({}, None, ())
        assert "training.batch_clip" in missing.problems[0]


def test_the_sample_and_its_limits_are_said(found: Comparison) -> None:
    said = " ".join(found.sentences)
    assert "n = 3, seeds 5, 6, 7" in said
    assert "rounds of one run are never a sample" in said
    assert (
        "with 3 seeds they cannot reach 0.05: the least possible p is 0.25 (Wilcoxon signed-rank) or 0.1 (Mann-Whitney)" in said
    )
    assert "paired t-test by seed" in said
    assert "Holm" in said


def test_files(found: Comparison) -> None:
    paths = write_files(found, check_runs(found))
    assert {p.name for p in paths.values()} == {
        *(
            "compare.html",
            "compare.md",
            "compare.csv",
            "cells.csv",
            "compare.json",
            "compare.tex",
            "compare.png",
            "compare.svg",
            "runs.html",
        )
    }
    with paths["table"].open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(found.rows)
    line = next(r for r in table if r["method"] == "dp-fedavg" and r["epsilon"] == "8.0")
    assert float(line["mean"]) == row(found, "dp-fedavg", 8.0).mean
    assert float(line["proven_epsilon"]) == pytest.approx(8.0, rel=1e-3)
    assert line["claimed_epsilon"] == ""
    assert math.isinf(float(next(r for r in table if r["method"] == "fedavg")["proven_epsilon"]))
    with paths["cells"].open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == 15
    assert {c["verification"] for c in cells} == {"verified"}
    assert {(found.path / c["run"] / "config.toml").is_file() for c in cells} == {True}
    stored = json.loads(paths["json"].read_text())
    assert stored["notes"] == found.sentences
    assert [r["mean"] for r in stored["rows"]] == [r.mean if r.values else None for r in found.rows]
    text = paths["markdown"].read_text()
    assert "| 1 | dp-fedavg" in text
    assert "training.batch_clip" in text
    assert paths["picture"].read_bytes().startswith(b"\x89PNG")
    drawn = paths["svg"].read_text()
    for name in ("dp-fedavg clip=0.01", "fedavg, no noise", "proven ε (log scale)"):
        assert f">{name}<" in drawn


def test_the_same_call_repeats_nothing_and_more_extends(found: Comparison) -> None:
    runs = {state.path: state.summary["run"] for r in found.rows for state in r.states}
    notes = Notes()
    more = compare(ComparisonSpec(small(seed=5, rounds=2), ["dp-fedavg", "aldp-fl"], [2.0], SEEDS), found.path, 1, notes)
    assert notes.checked == ["dp-fedavg", "aldp-fl"]
    assert {state.cell.name for state in notes.changes} == {f"aldp-fl/eps-2/seed-{s}" for s in (5, 6, 7)}
    assert row(more, "dp-fedavg", 2.0).values == row(found, "dp-fedavg", 2.0).values
    for state in row(more, "dp-fedavg", 2.0).states:
        assert state.summary["run"] == runs[state.path]
    shown = shown_by(notes.table)
    assert shown.count("3/3") == 2
    assert "12 of 12 rounds" in shown
    with pytest.raises(ConfigError, match=r"training\.rounds was 2 and is 3"):
        compare(ComparisonSpec(small(seed=5, rounds=3), ["dp-fedavg"], [2.0], [5]), found.path)


def test_keys_that_change_no_result_continue_the_comparison(found: Comparison) -> None:
    sections = small(seed=5, rounds=2).model_dump(mode="json")
    sections["run"] |= {"track": ["tensorboard"], "deterministic": True, "clients_at_once": 2, "name": "again"}
    sections["training"]["client_timeout"] = 60.0
    notes = Notes()
    again = compare(ComparisonSpec(parse(sections), METHODS, EPSILONS, SEEDS), found.path, 1, notes)
    assert notes.changes == []
    more = compare(ComparisonSpec(parse(sections), ["dp-fedavg:clip=0.02"], [8.0], [5, 6]), found.path, 1)
    assert [s.state for s in more.rows[0].states] == ["done", "done"]
    assert list(more.rows[0].states[0].path.glob("tensorboard/events.*"))
    assert [r.values for r in again.rows] == [r.values for r in found.rows]


def shown_by(what: Any) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_the_final_table(found: Comparison) -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    render(found, console)
    text = console.export_text()
    best = row(found, "dp-fedavg", 8.0)
    assert f"{100 * best.mean:.1f} ± {100 * best.sd:.1f} %" in text
    assert "noisy-fedavg: Noisy-FedAvg and Noisy-FedProx take K steps" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("metric", "mode"), [("test_accuracy", 0o755), ("train_loss", 0o700)])
def test_a_comparison_by_a_private_figure_is_for_its_owner_alone(found: Comparison, metric: str, mode: int) -> None:
    found.path.chmod(0o755)
    write_files(replace(found, metric=metric), check_runs(found))
    assert (found.path.stat().st_mode & 0o777) == mode


def test_the_command_ends_with_the_same_table(found: Comparison) -> None:
    write_files(found, check_runs(found))
    arguments = ["compare", str(found.path / "base.toml"), "--methods", ",".join(METHODS), "--epsilon", "2,8", "--seeds", "3"]
    printed = CliRunner().invoke(app, [*arguments, "--out", str(found.path)])
    assert printed.exit_code == 0, printed.output
    assert "done" not in printed.output  # nothing was left to run
    best = row(found, "dp-fedavg", 8.0)
    assert f"{100 * best.mean:.1f} ± {100 * best.sd:.1f} %" in printed.output
    assert str(found.path / "compare.html") in printed.output
    for wrong, message in ((["--epsilon", "two"], "give numbers with commas"), (["--by", "proof"], "proven and claimed")):
        refused = CliRunner().invoke(app, [*arguments, *wrong])
        assert refused.exit_code != 0
        assert message.split()[0] in refused.output + str(refused.exception)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"no method can be run in this setting\. noisy-fedavg: .*batch_clip"):
        compare(ComparisonSpec(small(), ["noisy-fedavg"], [2.0], [0]))
    with pytest.raises(ConfigError, match="at least 1 seed"):
        seeds_from(small(), 0)
    for arguments, message in (
        ({"by": "proof"}, "there are proven and claimed"),
        ({"metric": "loss"}, "there are test_accuracy"),
    ):
        with pytest.raises(ConfigError, match=message):
            ComparisonSpec(small(), ["dp-fedavg"], [2.0], [0], **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one method"):
        ComparisonSpec(small(), [], [2.0], [0])


def test_seeds_are_counted_from_that_of_the_configuration() -> None:
    assert list(seeds_from(small(seed=5), 3)) == [5, 6, 7]


def test_the_default_directory_belongs_to_the_configuration() -> None:
    assert default_out(small(seed=1)) == default_out(small(seed=2))
    assert default_out(small()) != default_out(small(rounds=4))


def test_a_failed_cell_is_left_out_and_told(found: Comparison) -> None:
    rows = {m: row(found, m, 8.0) for m in ("dp-fedavg", "dp-fedavg:clip=0.01")}
    states = {s.cell.name: s for r in rows.values() for s in r.states}
    broken = rows["dp-fedavg"].states[0]
    failed = {**states, broken.cell.name: CellState(broken.cell, broken.path, "failed", error="the disk is full")}
    planned = [Planned(m, "", 8.0, tuple(s.cell for s in r.states)) for m, r in rows.items()]
    incomplete, other = rows_of(planned, failed, ACCURACY)
    assert sorted(incomplete.values) == [6, 7]
    assert incomplete.problems == ("seed 5: failed: the disk is full",)
    assert (incomplete.rank, incomplete.against, verdict(incomplete)) == (None, None, "only 2 of 3 seeds")
    assert (other.rank, verdict(other)) == (None, "alone")
    assert [r.method for r in blocks([incomplete, other])["", 8.0]] == [other.method, incomplete.method]
    absent, _ = rows_of(planned, states, Columns()["mean_personal_accuracy"])
    assert absent.problems == ("seeds 5, 6, 7: no mean_personal_accuracy",)
    kept = replace(found, rows=(incomplete, other))
    console = Console(record=True, width=80, file=io.StringIO())
    render(kept, console)
    assert re.search(r"dp-fedavg .* only 2 of 3 seeds", console.export_text())
    assert not kept.failed
    empty = replace(found, rows=(absent,))
    assert empty.failed
    assert "| rank |" not in markdown(empty, {})


def test_a_comparison_without_a_number_ends_with_status_1(
    found: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    write_config(config, found.config.resolved())
    for rows, status in ((found.rows, 0), ((*found.rows, replace(row(found, "dp-fedavg", 2.0), values={})), 1)):
        monkeypatch.setattr("fedveil.cli.study_terminal.compare", lambda *_, rows=rows: replace(found, rows=rows))
        monkeypatch.setattr("fedveil.cli.study_terminal.check_runs", lambda _: {})
        monkeypatch.setattr("fedveil.cli.study_terminal.write_files", lambda *_: {})
        assert CliRunner().invoke(app, ["compare", str(config), "--methods", "dp-fedavg"]).exit_code == status


def test_a_comparison_with_a_contradicted_run_ends_with_status_1(
    found: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    write_config(config, found.config.resolved())
    monkeypatch.setattr("fedveil.cli.study_terminal.compare", lambda *_: found)
    monkeypatch.setattr("fedveil.cli.study_terminal.write_files", lambda *_: {})
    statement = next(state.path for row in found.rows for state in row.states) / "statement.json"
    honest = statement.read_bytes()
    for text, status in ((honest, 0), (honest.replace(b'"delta": 0.001', b'"delta": 1e-09'), 1)):
        statement.write_bytes(text)
        done = CliRunner().invoke(app, ["compare", str(config), "--methods", "dp-fedavg"])
        statement.write_bytes(honest)
        assert done.exit_code == status, done.output
        assert ("Verification: contradicted (1 of" in done.output) is bool(status)


def test_methods_whose_claims_have_the_same_scope_are_all_named(found: Comparison) -> None:
    claim = Claim(3.0, 1e-3, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER), "a paper")
    one = row(found, "dp-fedavg", 8.0)
    assert one.statement is not None
    server, *others = one.statement.views
    statement = replace(one.statement, views=(replace(server, claimed=claim), *others))
    said = promise_sentences([replace(one, method=m, statement=statement) for m in ("first", "second:clip=1")], "proven")
    assert "Claimed by the papers: first, second: client level" in said[1]


def test_a_comparison_says_what_a_seen_number_of_participants_costs(found: Comparison) -> None:
    one = row(found, "dp-fedavg", 8.0)
    assert one.statement is not None
    proven = one.statement.proven.epsilon
    assert not any("how many" in line for line in promise_sentences([one], "proven"))
    server, own, last = one.statement.views
    seen = replace(one, statement=replace(one.statement, views=(server, replace(own, seen_count=20.08), last)))
    said = promise_sentences([seen, seen], "proven")
    assert said[1] == (
        f"Proven against those who do not see how many clients take part in a round; else {at_most(proven)} becomes 20.08."
    )
    more = replace(seen, method="second", statement=replace(one.statement, views=(server, replace(own, seen_count=30.5), last)))
    assert promise_sentences([seen, more], "proven")[1].endswith(f"else {at_most(proven)} becomes 20.08 or 30.5.")


def test_a_row_shows_the_largest_proven_epsilon_of_its_seeds(found: Comparison) -> None:
    states = row(found, "dp-fedavg", 8.0).states
    first = states[0].statement
    assert first is not None
    server, own, last = first.views
    worse = replace(first, views=(server, replace(own, proven=replace(own.proven, epsilon=9.5)), last))
    planned = Planned("dp-fedavg", "", 8.0, tuple(state.cell for state in states), "", first)
    shown = _row(planned, [states[0], replace(states[1], statement=worse), *states[2:]], Columns().main)
    assert proven(shown) == "9.5"


def test_a_comparison_says_what_its_proven_numbers_rest_on(found: Comparison) -> None:
    one = replace(row(found, "dp-fedavg", 8.0), states=())
    assert one.statement is not None
    shared, own = one.statement.assumptions[0], Assumption("its clients are asked once", "else they answer twice")
    other = replace(one, method="second:clip=1", statement=replace(one.statement, assumptions=(shared, own)))
    nothing = replace(other, method="fedavg", statement=_unproven(one.statement))
    names = short_names([r.method for r in (one, other, nothing)])
    items = assumptions_of([one, one, other, nothing], names).items
    assert items[0] == Item(shared.what, shared.why), "all that prove something rest on it, so nobody is named"
    assert {item.text.split(":")[0] for item in items[1:-1]} == {"dp-fedavg"}
    assert items[-1] == Item("second: its clients are asked once", "else they answer twice")
    assert not assumptions_of([nothing], names).items
    first, *others = row(found, "dp-fedavg", 8.0).states
    mixed = replace(one, states=(first, *(replace(state, statement=other.statement) for state in others)))
    assert Item(own.what, own.why) in assumptions_of([mixed], names).items, "one seed's run rests on it"
    text = markdown(replace(found, methods=[one.method, other.method], rows=(one, other)), {})
    assert "- second: its clients are asked once (why: else they answer twice)" in text.split("rest on")[1]


def _unproven(statement: Statement) -> Statement:
    server, own, last = statement.views
    return replace(statement, views=(server, replace(own, proven=replace(own.proven, epsilon=math.inf, reason="no noise")), last))


def test_the_lower_error_is_the_better_one() -> None:
    error = Column("test_rmse", "Error", better="lower")
    rows = [Row(m, "", 2.0, error, 3, dict(enumerate(v))) for m, v in {"a": (1.0, 1.2, 1.1), "b": (2.0, 2.5, 2.3)}.items()]
    first, second = (_placed(row, rows) for row in rows)
    assert (first.rank, first.against, second.rank) == (1, None, 2)
    assert second.against is not None
    assert (second.against.best, second.against.difference) == ("a", pytest.approx((1.0 + 1.3 + 1.2) / 3))
    wide = Row("c", "", 2.0, error, 2, {0: 0.1, 1: 2.0})
    assert wide.around[0] < 0  # an error may not be below 0, but its interval is not cut as that of a share is
    assert Row("c", "", 2.0, Columns().main, 2, {0: 0.1, 1: 0.9}).around == (0.0, 1.0)
