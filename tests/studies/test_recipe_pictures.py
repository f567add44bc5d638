"""Pictures of recipes show what their titles say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError
from fedveil.report import reproduce_figure
from fedveil.studies.reproduce.recipe import rows
from fedveil.studies.reproduce.recipe_files import load_recipe
from fedveil.studies.reproduce.reproduction import Reproduction, ReproductionSpec, RowOutcome, reproduce


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn, kept before they are saved."""
    figures: list[Any] = []
    save = reproduce_figure.save
    monkeypatch.setattr(reproduce_figure, "save", lambda figure, *given: (figures.append(figure), save(figure, *given))[1])
    return figures


def test_a_series_is_one_panel_and_the_heading_is_the_terminals(drawn: list[Any], tmp_path: Path) -> None:
    """Six columns of the analysis' Table 1 are three series at two rounds each; its small scale is the paper's own."""
    reproduce_figure.plot_reproduction(reproduce(ReproductionSpec("noisy-fedavg/table-1"), tmp_path))
    (figure,) = drawn
    assert [axis.get_title() for axis in figure.axes][:3] == ["claimed mu", "linear losses", "composed"]
    assert "Scale: small, which is the paper's own here" in figure.get_suptitle()
    ends = [line.get_ydata()[-1] for line in figure.axes[0].lines]
    assert ends[0] == pytest.approx(46.24, abs=0.01)


def of_rows(name: str, measured: dict[str, list[tuple[int, float]]], tmp_path: Path) -> Reproduction:
    """A reproduction in which every row measured the same."""
    recipe = load_recipe(name)
    values = tuple((1.0 + i,) for i in range(len(recipe.columns)))
    problems = ("",) * len(values)
    outcomes = tuple(RowOutcome(row, values, problems, measured=measured) for row in rows(recipe))
    return Reproduction(name, recipe, "small", 1, (), {}, outcomes, 0, tmp_path)


def test_a_spread_is_no_curve(drawn: list[Any], tmp_path: Path) -> None:
    """FedANC's Fig. 3: the outputs are curves, their spreads over the first rounds a dot for each controller."""
    series = [(1, 0.5), (2, 0.6)]
    done = of_rows("fedanc/fig-3", {"beta": series, "gamma": series, "test_accuracy": series}, tmp_path)
    reproduce_figure.plot_reproduction(done)
    titles = [name for axis in drawn[0].axes if (name := axis.get_title() or axis.get_xlabel())]
    curves = ["noise scale beta", "share gamma", "accuracy (%)"]
    assert titles == [curves[0], "spread of beta, first rounds", curves[1], "spread of gamma, first rounds", curves[2]]
    assert [len(axis.lines[0].get_xdata()) for axis in drawn[0].axes if axis.lines] == [2, 2, 2]


def test_values_over_epsilon_have_epsilon_below(drawn: list[Any], tmp_path: Path) -> None:
    """LaDP-FL's Fig. 4: accuracy and loss over at least four epsilons, ours as lines and the paper's as dots."""
    reproduce_figure.plot_reproduction(of_rows("ladp-fl/fig-4", {}, tmp_path))
    accuracy, loss = drawn[0].axes[:2]
    assert [axis.get_xlabel() for axis in (accuracy, loss)] == ["epsilon", "epsilon"]
    ours = [line for line in accuracy.lines if not line.get_label().endswith("paper")]
    assert list(ours[0].get_xdata()) == [0.16, 0.24, 0.32, 0.4]
    assert [list(line.get_ydata()) for line in accuracy.lines if line.get_label().endswith("paper")] == [
        [22.4, 61.67],
        [12.23, 52.05],
    ]


def test_a_picture_needs_an_axis_of_numbers(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "src/fedveil/papers/ladp_fl/recipes/ladp-fl/fig-4.toml").read_text(encoding="utf-8")
    file = tmp_path / "fig.toml"
    file.write_text(text.replace('picture = "epsilon"', 'picture = "method"'), encoding="utf-8")
    with pytest.raises(ConfigError, match="there are dots, curves, epsilon"):
        load_recipe(file)
