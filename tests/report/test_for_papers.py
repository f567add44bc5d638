"""A comparison for a paper: verdicts as sentences, LaTeX, figures of a given size, and runs against epsilon."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli.app import app
from fedveil.drawing import Paper
from fedveil.errors import ConfigError
from fedveil.federation.history import Columns
from fedveil.report.compare_page import page_values, plot_comparison
from fedveil.report.compare_paper import latex, verdict_sentences
from fedveil.studies.compare.comparison import Comparison
from fedveil.studies.compare.comparison_rows import Row
from fedveil.studies.statistics import against_best
from grid_cells import small

NUMBERS = {
    "dp-fedavg": {1: 0.8, 2: 0.84, 3: 0.82},
    "fedavg": {1: 0.79, 2: 0.85, 3: 0.78},
    "noisy_x": {1: 0.50, 2: 0.54, 3: 0.53},
}


def comparison(folder: Path, methods: tuple[str, ...]) -> Comparison:
    samples = {method: NUMBERS[method] for method in methods}
    tests = against_best(samples)
    rows = [
        Row(method, "", 2.0, Columns().main, 3, values, 1 if method == "dp-fedavg" else 2, tests.get(method))
        for method, values in samples.items()
    ]
    return Comparison(folder, small(), "proven", "test_accuracy", methods, (2.0,), (), (1, 2, 3), tuple(rows))


def test_the_verdict_is_a_sentence_with_the_interval_of_the_difference(tmp_path: Path) -> None:
    (line,) = verdict_sentences(comparison(tmp_path, ("dp-fedavg", "fedavg")))
    differences = [NUMBERS["fedavg"][seed] - NUMBERS["dp-fedavg"][seed] for seed in (1, 2, 3)]
    p = stats.ttest_1samp(differences, 0).pvalue
    low, high = stats.t.interval(0.95, 2, loc=sum(differences) / 3, scale=stats.sem(differences))
    assert line == (
        f"At proven epsilon 2 no method is shown to be better, p = {p:.3f} (against dp-fedavg: fedavg "
        f"{100 * sum(differences) / 3:+.3g} points, 95 % interval {100 * low:.3g} to {100 * high:.3g})."
    )
    (both,) = verdict_sentences(comparison(tmp_path, ("dp-fedavg", "fedavg", "noisy_x")))
    assert both.startswith("At proven epsilon 2 dp-fedavg is better than noisy_x, p < 0.001, ")
    assert "and is not shown to be better than fedavg, p = 0." in both


def test_the_page_begins_with_the_verdict(tmp_path: Path) -> None:
    made = comparison(tmp_path, ("dp-fedavg", "fedavg", "noisy_x"))
    (result,) = page_values(made)["results"]
    (sentence,) = verdict_sentences(made)
    assert sentence == f"{result['verdict'][:-1]} ({result['differences'][0].lower()}{result['differences'][1:-1]})."
    (alone,) = page_values(comparison(tmp_path, ("dp-fedavg",)))["results"]
    assert alone == {"verdict": "Proven epsilon = 2: dp-fedavg 82.0 ± 2.0 %."}


def test_the_table_is_latex(tmp_path: Path) -> None:
    text = latex(comparison(tmp_path, ("dp-fedavg", "noisy_x")))
    assert r"Method & proven" not in text
    assert r"Method & $\varepsilon = 2$ \\" in text
    assert r"dp-fedavg & $\mathbf{82.0 \pm 2.0}$ \\" in text
    assert r"noisy\_x & $52.3 \pm 2.1$ \\" in text


def test_a_figure_has_the_size_and_font_of_the_paper(tmp_path: Path) -> None:
    plot_comparison(comparison(tmp_path, ("dp-fedavg", "fedavg")), tmp_path / "c.svg", Paper.of("3.5x2", "serif:7"))
    text = (tmp_path / "c.svg").read_text()
    assert 'width="252pt" height="144pt"' in text
    assert "7px" in text
    assert "8.5px" not in text
    with pytest.raises(ConfigError, match="give WIDTHxHEIGHT in inches"):
        Paper.of("3.5")


@pytest.mark.heavy
def test_runs_against_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, epsilon in (("a", 2.0), ("b", 8.0)):
        fv.Federation(
            model="linear",
            data="digits",
            method="dp-fedavg",
            training={"rounds": 1},
            privacy={"epsilon": epsilon, "delta": 1e-2},
        ).fit(out=name, engine="inline")
    done = CliRunner().invoke(app, ["plot", "a", "b", "--against", "epsilon", "--out", "e.svg", "--figure", "4x3"])
    assert done.exit_code == 0, done.output
    text = Path("e.svg").read_text()
    assert "proven epsilon" in text
    assert "dp-fedavg (proven)" in text
    refused = CliRunner().invoke(app, ["plot", "a", "b"])
    assert "add --against epsilon" in str(refused.exception)
