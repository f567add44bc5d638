"""What goes into a report: reading run directories, spending from the ledger, grouping, escaping; and the plots."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import tomli_w
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

import report_runs as runs
from fedveil.accounting.accountant import bound
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, Audit, Event, Gaussian, SampledGaussian, Scope, Unbounded, Unit, View
from fedveil.cli.app import app
from fedveil.cli.privacy_terminal import render_ledger
from fedveil.data.load import load
from fedveil.errors import ConfigError
from fedveil.experiment.recorded_run import group_names, grouped, read_run
from fedveil.experiment.run_directory import write_table
from fedveil.ledger.ledger import Entry, Ledger
from fedveil.report.figures import plot_run
from fedveil.report.privacy_section import spent
from fedveil.report.report import page_values, write_report
from fedveil.statement.statement_layout import render, render_brief
from fedveil.studies.statistics import POINTS, thinned

SERVER = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER)
AGGREGATE = replace(SERVER, view=View.AGGREGATE)
Made = dict[str, Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return runs.make(tmp_path_factory)


def copied(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to))


# --- spending ------------------------------------------------------------------------------------------------------------


def charged(path: Path, scope: Scope, releases: Sequence[tuple[int, int, Event]]) -> Path:
    with Ledger.create(path, "r") as ledger:
        for t, client, event in releases:
            noise = (0.0,) if isinstance(event, Unbounded) else (1.0,)
            entry = Entry("r", t, client, scope.unit, scope.adjacency, scope.view, event, (1.0,), noise, 1, 1, 1)
            ledger.charge(entry)
    return path


def test_spending_is_that_of_the_dearest_and_of_the_median_client(tmp_path: Path) -> None:
    book = charged(
        tmp_path / "l.sqlite",
        SERVER,
        [(0, 0, Gaussian(0.3)), (0, 1, Gaussian(0.1)), (2, 1, Gaussian(0.4)), (3, 2, Gaussian(0.2))],
    )
    found = spent(book, SERVER, 1e-4, clients=5)
    at = [0.3, math.sqrt(0.1**2 + 0.4**2), math.sqrt(0.17)]
    assert [t for t, _ in found.most] == [1, 3, 4]
    assert [e for _, e in found.most] == pytest.approx([epsilon_of(mu, 1e-4) for mu in at], rel=1e-12)
    middle = epsilon_of(0.2, 1e-4)  # after the last round: 0, 0, 0.2, 0.3, sqrt(0.17)
    assert [e for _, e in found.median] == pytest.approx([0.0, 0.0, middle], rel=1e-12)
    assert found.releases == 4


def test_spending_of_sampled_releases_is_the_accountants(tmp_path: Path) -> None:
    event = SampledGaussian(0.25, 1.1)
    book = charged(tmp_path / "l.sqlite", AGGREGATE, [(t, -1, event) for t in range(30)])
    found = spent(book, AGGREGATE, 1e-4, clients=5)
    assert found.median == []
    assert found.most[0][0] == 1
    assert found.most[-1][0] == 30
    for t, epsilon in found.most:
        want = bound([SampledGaussian(0.25, 1.1, t)], 1e-4, adjacency=Adjacency.ZERO_OUT)[0]
        assert epsilon == pytest.approx(want, rel=1e-9)


def test_the_client_that_spent_most_is_found_among_releases_of_several_kinds(tmp_path: Path) -> None:
    """Seldom with little noise costs more than often with much, though the central limit theorem says otherwise."""
    scope = replace(SERVER, unit=Unit.RECORD)
    seldom, often = SampledGaussian(0.025, 0.6), SampledGaussian(0.5, 4.0)
    book = charged(tmp_path / "l.sqlite", scope, [(t, c, e) for t in range(9) for c, e in enumerate((seldom, often))])
    found = spent(book, scope, 1e-5, clients=2)
    dear, cheap = (bound([replace(e, count=9)], 1e-5, adjacency=scope.adjacency)[0] for e in (seldom, often))
    assert dear > 2 * cheap
    assert found.most[-1] == (9, pytest.approx(dear, rel=1e-9))
    assert found.median[-1] == (9, pytest.approx(cheap, rel=1e-9))


def test_spending_without_bound_says_why(tmp_path: Path) -> None:
    book = charged(tmp_path / "l.sqlite", SERVER, [(0, 0, Gaussian(0.3)), (1, 0, Unbounded("read raw data"))])
    found = spent(book, SERVER, 1e-4, clients=1)
    assert math.isfinite(found.most[0][1])
    assert math.isinf(found.most[1][1])
    assert found.problem == "read raw data"


def test_a_ledger_that_is_absent_damaged_or_of_another_scope_gives_no_number(tmp_path: Path) -> None:
    assert "no ledger" in spent(tmp_path / "none", SERVER, 1e-4, 1).problem
    book = charged(tmp_path / "l.sqlite", SERVER, [(0, 0, Gaussian(0.3))])
    other = spent(book, AGGREGATE, 1e-4, 1)
    assert (other.most, "promised scope" in other.problem) == ([], True)
    (tmp_path / "bad.sqlite").write_bytes(b"not a database" * 100)
    bad = spent(tmp_path / "bad.sqlite", SERVER, 1e-4, 1)
    assert bad.most == []
    assert bad.problem


def test_spending_of_a_run_ends_at_what_is_proven(made: Made) -> None:
    for name in ("one", "loose"):
        (group,) = page_values([read_run(made[name])])["groups"]
        assert group["spent"]["most"][-1] == (runs.ROUNDS, pytest.approx(group["proven_value"], rel=1e-3))


# --- reading and grouping ------------------------------------------------------------------------------------------------


def test_a_run_leaves_who_holds_what(made: Made) -> None:
    stored = json.loads((made["one"] / "private" / "partition.json").read_text())
    counts = np.array(stored["counts"])
    assert counts.shape == (runs.CLIENTS, 10)
    assert stored["listed"] == list(range(runs.CLIENTS))
    labels = np.bincount(load("digits").y_train, minlength=10)
    assert (counts.sum(axis=0) <= labels).all()
    assert 0.75 < counts.sum() / labels.sum() < 0.85  # a fifth of each client's examples is its own test


def test_seeds_are_one_group_with_mean_and_its_confidence_interval(made: Made) -> None:
    values = page_values([read_run(made[n]) for n in ("loose", "one", "other")])
    tight, loose = values["groups"]
    assert (tight["seeds"], loose["seeds"]) == ([1, 2], [1])
    assert [g["name"] for g in values["groups"]] == ["dp-fedavg, epsilon 6", "dp-fedavg, epsilon 40"]
    both = [[float(r["test_accuracy"]) for r in runs.table(made[n] / "history.csv")] for n in ("one", "other")]
    curve = tight["curves"]["test_accuracy"]
    assert [t for t, _ in curve["points"]] == [1, 2, 3, 4]
    assert [v for _, v in curve["points"]] == pytest.approx([fmean(pair) for pair in zip(*both, strict=True)])
    for (_, low, high), pair in zip(curve["band"], zip(*both, strict=True), strict=True):
        theirs = stats.t.interval(0.95, 1, loc=fmean(pair), scale=stats.sem(pair))
        assert (low, high) == pytest.approx(theirs)
    assert "band" not in loose["curves"]["test_accuracy"]
    assert tight["score"] == pytest.approx(100 * fmean(b[-1] for b in both))


def test_noise_of_unknown_effect_is_left_out_and_the_rest_is_shown(made: Made, tmp_path: Path) -> None:
    copies = []
    for name in ("one", "other"):
        run = copied(made[name], tmp_path / name)
        for file, changes in (
            ("history.csv", {"noise_norm": "", "cumulative_noise_norm": "", "clip": "1e999"}),
            ("layers.csv", {"noise_std": ""}),
        ):
            write_table(run / file, [row | {k: v for k, v in changes.items() if k in row} for row in runs.table(run / file)])
        copies.append(run)
    for paths in (copies, copies[:1], [copies[0], made["other"]]):
        (group,) = page_values([read_run(path) for path in paths])["groups"]
        assert group["curves"]["update_norm"]["points"]
        assert not group["curves"].get("noise_norm", {}).get("points")
        assert group["layers"]["noise_std"] == []
        assert write_report(paths, tmp_path / "page.html").stat().st_size > 0
    assert plot_run(copies[0]).is_file()


def test_names_tell_configurations_apart_with_the_fewest_settings(made: Made) -> None:
    one = read_run(made["one"])
    again = [replace(one, config={**one.config, "method": {**one.config["method"], "clip": clip}}) for clip in (0.5, 1.0)]
    other = replace(one, config={**one.config, "method": {"name": "fedavg"}})
    assert group_names(grouped([*again, other])) == ["dp-fedavg, clip 0.5", "dp-fedavg, clip 1", "fedavg"]
    elsewhere = replace(other, config={**other.config, "data": {**other.config["data"], "name": "mnist"}})
    assert group_names(grouped([one, elsewhere])) == ["dp-fedavg, digits", "fedavg, mnist"]
    assert group_names(grouped([other, elsewhere])) == ["fedavg, digits", "fedavg, mnist"]


def test_long_curves_are_thinned_and_keep_both_ends() -> None:
    assert thinned([3, 4, 9]) == [3, 4, 9]
    kept = thinned(range(1, 10_002))
    assert len(kept) <= POINTS + 1
    assert (kept[0], kept[-1]) == (1, 10_001)


def test_fairness_is_over_the_clients_of_the_last_evaluated_round(made: Made) -> None:
    (group,) = page_values([read_run(made["one"])])["groups"]
    rows = [r for r in runs.table(made["one"] / "private" / "clients.csv") if r["round"] == "3" and r["accuracy"]]
    want = sorted(100 * float(r["accuracy"]) for r in rows)
    assert group["clients"]["final"] == pytest.approx(want)
    assert group["clients"]["points"][-1] == [4, pytest.approx(np.median(want))]


def test_errors_say_what_to_give(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        write_report([tmp_path])
    with pytest.raises(ConfigError, match="given twice"):
        write_report([made["one"], made["one"]])
    with pytest.raises(ConfigError, match="1 to 60 runs, got 0"):
        write_report([])
    with pytest.raises(ConfigError, match="cannot write the report"):
        write_report([made["one"]], made["one"] / "config.toml" / "x.html")
    grid = tmp_path / "grid"
    grid.mkdir()
    (grid / "grid.json").touch()
    with pytest.raises(ConfigError, match=r"its run directories lie under .*cells"):
        write_report([grid])
    (grid / "compare.html").touch()
    with pytest.raises(ConfigError, match=r"its pages are .*compare\.html; its run directories"):
        write_report([grid])
    empty = copied(made["one"], tmp_path / "empty")
    (empty / "history.csv").unlink()
    with pytest.raises(ConfigError, match="no finished round"):
        write_report([empty])
    broken = copied(made["one"], tmp_path / "broken")
    (broken / "statement.json").write_text("{")
    with pytest.raises(ConfigError, match=r"not a run directory with a readable statement\.json"):
        write_report([broken])


def test_page_is_small_closed_and_cannot_be_broken_by_what_a_run_says(made: Made, tmp_path: Path) -> None:
    run = copied(made["one"], tmp_path / "run")
    (run / "private" / "failures.csv").write_text('round,client,failure\n0,1,"</script><script>alert(1)</script>"\n')
    (run / "attack-large.png").write_bytes(b"\x89PNG" + b"0" * 4_000_000)
    path = write_report([run])
    page = path.read_text(encoding="utf-8")
    assert path == run / "report.html"
    assert path.stat().st_size < 5_000_000
    assert page.count("<script") == 5
    assert "alert(1)</script>" not in page
    assert not re.search(r"\{\{[a-z.]+\}\}", page)
    assert set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'`)]*", page)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def badges(said: dict[str, Any]) -> list[list[str]]:
    """The marks of each view, all of which are on the proven number."""
    rows = said["sections"]["numbers"]["table"]["rows"]
    assert not any(cell["badge"] for row in rows for cell in (*row[:3], *row[4:]))
    return [[row[3]["badge"]] if row[3]["badge"] else [] for row in rows]


def test_audits_of_the_statement_are_lower_bounds_and_refute(made: Made) -> None:
    run = read_run(made["one"])
    assert run.statement is not None
    audit = Audit(9.5, 1e-3, AGGREGATE, "single upload", 0.95, 1000)
    (group,) = page_values([replace(run, statement=run.statement.with_audits([audit]))])["groups"]
    said = group["statement"]
    assert group["cards"]["audited"]["value"] == "≥ 9.5"
    assert "client level, zero-out, aggregate view" in group["cards"]["audited"]["lines"][0]
    assert badges(said) == [[], ["REFUTED"], []]
    assert "REFUTED" in said["contradictions"][0]


def test_seeds_share_their_audits_and_show_the_largest_epsilon_in_any_order(made: Made) -> None:
    one, other = read_run(made["one"]), read_run(made["other"])
    assert one.statement is not None
    assert other.statement is not None
    audits = [Audit(9.5, 1e-3, AGGREGATE, "single upload", 0.95, 1000), Audit(2.0, 1e-3, AGGREGATE, "one run", 0.95, 1000)]
    one = replace(one, statement=one.statement.with_audits(audits[:1]))
    views = tuple(replace(v, proven=replace(v.proven, epsilon=v.proven.epsilon + 1)) for v in other.statement.views)
    other = replace(other, statement=replace(other.statement, views=views).with_audits(audits[1:]))
    for order in ([one, other], [other, one]):
        (group,) = page_values(order)["groups"]
        said = group["statement"]
        assert group["cards"]["audited"]["value"] == "≥ 9.5"
        assert badges(said) == [[], ["REFUTED"], []]
        assert [text.split(":")[0] for text in said["contradictions"]] == ["REFUTED"]
        assert group["proven_value"] == pytest.approx(7.0, rel=1e-3)
        assert said["warnings"][-1] == "The runs do not prove the same epsilon (6, 7): the largest is shown."


def test_spending_of_seeds_is_that_of_the_one_that_spent_most(made: Made, tmp_path: Path) -> None:
    one, short = read_run(made["server"]), copied(made["server"], tmp_path / "short")
    for left in short.glob("ledger.sqlite*"):
        left.unlink()
    settled = replace(read_run(short), config={**one.config, "run": {**one.config["run"], "seed": 7}})
    for order in ([one, settled], [settled, one]):
        (group,) = page_values(order)["groups"]
        assert group["spent"]["most"][-1][0] == runs.ROUNDS
        assert group["spent"]["unknown"] == ["Seed 7: the run directory has no ledger"]
    charged(short / "ledger.sqlite", SERVER, [(0, 0, Gaussian(0.01))])
    for order in ([one, settled], [settled, one]):
        (group,) = page_values(order)["groups"]
        assert group["spent"]["most"][-1][0] == runs.ROUNDS
        assert group["spent"]["differ"].endswith("drawn is seed 1.")


# --- terminal ------------------------------------------------------------------------------------------------------------


def test_short_statement_keeps_numbers_and_words_and_drops_the_lists(made: Made, tmp_path: Path) -> None:
    statement = read_run(made["one"]).statement
    assert statement is not None
    texts = []
    for draw in (render, render_brief):
        with (tmp_path / "out").open("w") as sink:
            console = Console(width=80, record=True, file=sink)
            draw(statement, console)
            texts.append(console.export_text())
    long, short = texts
    for word in ("simulation only", "aggregate *", "server", "In plain words"):
        assert word in short
    for word in ("Assumptions", "Not protected"):
        assert word in long
        assert word not in short


def test_ledger_fits_80_columns_and_says_once_what_all_rows_share(made: Made, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as sink:
        console = Console(width=80, record=True, file=sink)
        render_ledger(made["server"] / "ledger.sqlite", console)
        text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert text.count("zero-out") == 1
    assert "…" not in text
    with Ledger.open(made["server"] / "ledger.sqlite") as book:
        clients = {entry.client for _, _, entry in book.entries()}
    listed = {int(m[1]) for m in re.finditer(r"^ +(\d+) ", text, re.MULTILINE)}
    assert listed == clients


# --- plots ---------------------------------------------------------------------------------------------------------------


def test_plots_are_written_where_asked(made: Made, tmp_path: Path) -> None:
    run = copied(made["one"], tmp_path / "run")
    assert plot_run(run) == run / "overview.png"
    assert plot_run(run, ["noise", "train_loss"]).name == "plot-noise-train_loss.png"
    svg = plot_run(run, ["clip"], tmp_path / "c.svg").read_text()
    assert svg.lstrip().startswith("<?xml")


def test_an_unknown_column_names_those_that_there_are(made: Made, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no column 'trainloss' \(did you mean 'train_loss'\?\); there are accuracy, .*test_f1"
    ):
        plot_run(made["one"], ["trainloss"])
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        plot_run(made["one"], ["clip"], tmp_path / "c.doc")
    with pytest.raises(ConfigError, match="does not exist"):
        plot_run(made["one"], ["clip"], tmp_path / "no" / "c.png")


# --- commands ------------------------------------------------------------------------------------------------------------


def test_commands_write_reports_and_plots_and_a_run_ends_with_its_report(made: Made, tmp_path: Path) -> None:
    call = CliRunner().invoke
    done = call(app, ["report", str(made["one"]), str(made["other"]), "--out", str(tmp_path / "two.html")])
    assert done.exit_code == 0, done.output
    assert f"report: {tmp_path / 'two.html'}" in done.output
    audited = copied(made["server"], tmp_path / "audited")
    stale = "`fedveil report"
    assert stale not in call(app, ["audit", str(audited), "--n", "20"]).output
    (audited / "report.html").touch()
    assert stale in call(app, ["audit", str(audited), "--n", "20"]).output
    assert stale not in call(app, ["audit", str(audited), "--n", "20", "--json"]).output
    done = call(app, ["plot", str(made["one"]), "--what", "loss,clip", "--out", str(tmp_path / "p.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    config = tmp_path / "c.toml"
    config.write_text(tomli_w.dumps(runs.raw()))
    done = call(app, ["run", str(config), "--set", "training.rounds=1", "--out", str(tmp_path / "run"), "--quiet"])
    assert done.exit_code == 0, done.output
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in done.output
    assert f"{tmp_path / 'run' / 'statement.md'}" in done.output
    assert (tmp_path / "run" / "report.html").is_file()


def test_the_command_leaves_out_what_is_not_a_run_and_says_so(made: Made, tmp_path: Path) -> None:
    other = tmp_path / "attacks-of-something"
    other.mkdir()
    call = CliRunner().invoke
    mixed = call(app, ["report", str(made["one"]), str(other), "--out", str(tmp_path / "page.html")])
    assert mixed.exit_code == 0, mixed.output
    assert f"left out: {other} is not a run directory" in mixed.output
    assert (tmp_path / "page.html").is_file()
    for wrong in (["report", str(other)], ["report", str(made["one"]), str(tmp_path / "typo")]):
        refused = call(app, wrong)
        assert isinstance(refused.exception, ConfigError)
        assert "not a run directory" in str(refused.exception)
