"""The result of a run, with its representations as text and in a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.accounting.types import at_most
from fedveil.errors import ConfigError
from fedveil.federation.history import Columns, Row, all_failed
from fedveil.statement.statement import Statement
from fedveil.statement.statement_layout import html_table
from fedveil.statement.statement_text import TextCell, numbers_table, scope_line, variant_of

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.tasks.task import Task
    from fedveil.training.params import FlatModel

_WIDTH, _HEIGHT = 320, 80


@dataclass(frozen=True)
class Trivial:
    """Main metric of an answer that needs no training, on the same test set, and that answer in words."""

    score: float
    answer: str


def trivial_of(task: Task, targets: Tensor) -> Trivial | None:
    """Return the trivial score of a test set, or None if the task has none or there are no examples.

    Raises:
        ConfigError: `trivial` of a user-defined task fails, or returns something else.
    """
    if not len(targets):
        return None
    try:
        score = task.trivial(targets)
        return None if score is None or math.isnan(score) else Trivial(float(score), task.trivial_answer)
    except Exception as error:
        raise ConfigError(
            f"task.name = {task.name!r}: `trivial` has to return a number or None for the targets of the test set, and fails: "
            f"{type(error).__name__}: {error}"
        ) from error


def outcome_warnings(
    history: Sequence[Mapping[str, Any]], columns: Columns, trivial: Trivial | None, reason: str = ""
) -> tuple[str, ...]:
    """Return warnings for a reader of the scores: clients were left out, or the model learned nothing or too little.

    Everything but who was left out is judged from public columns, so a published copy of a run warns as the run does.

    Args:
        reason: of the first client that was left out. It is private, as is the fact that anybody was.
    """
    warnings, main = list[str](), columns.main
    failed = int(sum(row.get("failed") or 0 for row in history))
    if failed:
        nobody = all(all_failed(row) for row in history if row.get("participants"))
        whose = f"all {failed} client updates" if nobody else f"{failed} client update{'s' * (failed > 1)}"
        warnings.append(f"{whose} {'were' if failed > 1 else 'was'} left out; the first reason: {reason or 'not on record'}")
    values = [row[main.name] for row in history if row.get(main.name) is not None]
    if values and trivial is not None and main.sign * values[-1] <= main.sign * trivial.score + 1e-9 * abs(trivial.score):
        warnings.append(
            f"{main.phrase} {main.text(values[-1])} is no better than that of {trivial.answer}, {main.text(trivial.score)}"
        )
    elif values:
        warnings += _scores_by_chance(history, columns)
    return (*warnings, *_rising_loss(history), *_all_at_the_clip(history))


_CHANCE = {"test_auc": 0.5, "test_balanced_accuracy": 0.5, "test_concordance": 0.5, "test_r2": 0.0}
"""Scores of an answer that is the same for all examples."""
_NEAR = 0.005
"""A score this close to chance counts as one by chance."""


def _public(history: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = [row[name] for row in history if isinstance(row.get(name), int | float)]
    return [float(value) for value in values if math.isfinite(value)]


def _scores_by_chance(history: Sequence[Mapping[str, Any]], columns: Columns) -> list[str]:
    warnings = []
    for name, chance in _CHANCE.items():
        values = _public(history, name)
        if values and values[-1] <= chance + _NEAR:
            column = columns[name]
            text = f"{column.phrase} {column.text(values[-1])} is that of one answer for all ({column.text(chance)})"
            advice = ": one class is nearly always predicted at probability 1/2; set another threshold on the probabilities"
            warnings.append(text + advice * (name == "test_balanced_accuracy"))
    return warnings


def _rising_loss(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a warning if the test loss ends above its start, or has lost half of what it had gained."""
    losses = _public(history, "test_loss")
    if len(losses) < 3:
        return []
    first, least, last = losses[0], min(losses), losses[-1]
    if last > first:
        return [f"the test loss rose from {first:.4g} to {last:.4g}: lower training.optimizer.lr or the noise"]
    if last > least + (first - least) / 2:
        return [f"the test loss fell to {least:.4g} and rose again to {last:.4g}: take fewer rounds or a lower learning rate"]
    return []


def _all_at_the_clip(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a warning if the released means are as long as the clip allows, which needs every update to be cut to it.

    The expected noise is subtracted; the norm of a mean of clipped vectors reaches the clip only if all have that norm.
    """
    names = ("update_norm", "noise_norm", "clip")
    rows = [[row.get(name) for name in names] for row in history]
    full = [(u, z, c) for u, z, c in rows if isinstance(u, float) and isinstance(z, float) and isinstance(c, float)]
    signal = [math.sqrt(max(0.0, u**2 - z**2)) / c for u, z, c in full if c > 0 and z < c]
    if len(signal) < 3 or sum(one > _AT_THE_CLIP for one in signal) < len(signal) / 2:
        return []
    return [
        "in most rounds every update was cut to the clip, so that only its direction counted: a client with more examples, or "
        "with larger class weights, moved the model no further than others. Raise the method's clip, or take fewer local steps"
    ]


_AT_THE_CLIP = 0.9
"""Share of the clip from which on the norm of a mean counts as the clip."""


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run.

    Args:
        model: the final model. history: one record per round. privacy: the statement. path: the run directory.
        ended: why the run stopped before its last round, or an empty string.
        trivial: the score of a constant answer, if the task has one.
        columns: of the history. closing: the closing digest of its ledger, 64 hex digits, which stands for the whole run and can
            be pinned elsewhere. selection_score: noisy score by which runs are chosen, if any.
    """

    model: FlatModel
    history: list[Row]
    privacy: Statement
    path: Path
    ended: str = ""
    closing: str = ""
    selection_score: float | None = None
    columns: Columns = field(default_factory=Columns)
    trivial: Trivial | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the operator: of the statement, about clients that were left out, and if nothing was learned.

        They are private: who was left out, and why, is computed from private data.
        """
        reasons = [why for row in self.history for why in row["failures"].values()]
        return (*self.privacy.warnings, *outcome_warnings(self.history, self.columns, self.trivial, "".join(reasons[:1])))

    @property
    def score(self) -> float:
        """Return the main metric of the final model on the test set, such as its accuracy."""
        return self._last(self.columns.main.name)

    @property
    def scores(self) -> dict[str, float]:
        """Return the loss and all metrics of the final model on the test set, by name."""
        last = next((r for r in reversed(self.history) if "test_loss" in r), {})
        return {name.removeprefix("test_"): float(value) for name, value in last.items() if name.startswith("test_")}

    @property
    def accuracy(self) -> float:
        """Return the test accuracy of the final model, in [0, 1]."""
        return self._last("test_accuracy")

    def __repr__(self) -> str:
        warned = "".join(f"; warning: {text}" for text in self.warnings)
        return f"<Result of {_heading(self)}: {_score(self)}; {_promise(self)}; {self.path}{warned}>"

    def _repr_html_(self) -> str:
        return _page(self)

    def _last(self, name: str) -> float:
        values = [float(r[name]) for r in self.history if name in r]
        if not values:
            raise ConfigError(
                f"the history has no {name}: there are {', '.join(dict.fromkeys(k for r in self.history for k in r))}"
            )
        return values[-1]


def _page(result: Result) -> str:
    """Return the HTML for a notebook: three numbers and a curve, unstyled, so that it fits light and dark pages."""
    table = numbers_table(result.privacy)
    texts = replace(table, rows=tuple(tuple(TextCell(cell.text or "-") for cell in row) for row in table.rows))
    main = result.columns.main
    curve = [float(row[main.name]) for row in result.history if main.name in row]
    return (
        f"<p><b>{escape(_heading(result))}</b>: {escape(_score(result))}; {escape(_promise(result))}</p>"
        f"{''.join(f'<p><b>warning:</b> {escape(text)}</p>' for text in result.warnings)}"
        f"{_svg(curve, main.axis)}{html_table(texts)}<p><code>{escape(str(result.path))}</code></p>"
    )


def _heading(result: Result) -> str:
    return f"{result.privacy.method} ({variant_of(result.privacy)})"


def _score(result: Result) -> str:
    main = result.columns.main
    values = [float(row[main.name]) for row in result.history if main.name in row]
    rounds = f"after {len(result.history)} rounds"
    return f"{main.phrase} {main.text(values[-1])} {rounds}" if values else f"not evaluated, {rounds}"


def _promise(result: Result) -> str:
    proven = result.privacy.proven.epsilon
    return "nothing proven" if math.isinf(proven) else f"proven epsilon {at_most(proven)} at {scope_line(result.privacy)}"


def _svg(values: Sequence[float], title: str) -> str:
    """Return the curve over the rounds from the least to the largest value as SVG, or an empty string."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    points = " ".join(
        f"{5 + (_WIDTH - 10) * i / (len(finite) - 1):.1f},{_HEIGHT - 5 - (_HEIGHT - 10) * (v - low) / ((high - low) or 1):.1f}"
        for i, v in enumerate(finite)
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img"><title>{escape(title)}, from {low:.4g} to {high:.4g}</title>'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="2"/></svg>'
    )
