"""The contents of a run directory, for a report or a plot; a missing file is an empty table, a damaged one an error."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedveil.errors import ConfigError
from fedveil.experiment.config import flat, toml_values, without_free_keys
from fedveil.experiment.given_paths import require_one_run
from fedveil.experiment.model_section import HANDED_OVER
from fedveil.experiment.result import Trivial, outcome_warnings
from fedveil.experiment.run_directory import DECLARED, PRIVATE, joined, parse_columns, parse_table
from fedveil.federation.history import Columns, Row
from fedveil.statement.statement import Statement
from fedveil.statement.statement_layout import read_statement
from fedveil.tasks.task_registry import built_in_task

T = TypeVar("T")


@dataclass(frozen=True)
class RunData:
    """One run, as read from its directory.

    Args:
        config, config_text: the resolved configuration, and its file.
        history, layers, clients, participants, failures: tables, rows in order, with the private figures if the directory has
            them. declared: their columns.
        statement: None if the directory has none. partition: label counts of the clients, or None.
    """

    path: Path
    config: dict[str, Any]
    config_text: str
    statement: Statement | None
    history: list[Row]
    layers: list[Row]
    clients: list[Row]
    participants: list[Row]
    failures: list[Row]
    summary: dict[str, Any]
    versions: dict[str, str]
    partition: dict[str, Any] | None
    declared: Columns = field(default_factory=Columns)

    @property
    def columns(self) -> list[str]:
        """Return the history's columns that hold a number in at least one round."""
        names = dict.fromkeys(k for row in self.history for k in row if self.declared[k].kind == "number")
        return [k for k in names if self.points(k)]

    def points(self, column: str) -> list[tuple[int, float]]:
        """Return (round from 1, value) of a column of the history, where it has a value."""
        return [(row["round"] + 1, row[column]) for row in self.history if row.get(column) is not None]

    @property
    def trivial(self) -> Trivial | None:
        """Return the score of a constant answer, if the run recorded one."""
        recorded = self.summary.get("trivial")
        if not isinstance(recorded, dict) or not isinstance(recorded.get("score"), int | float):
            return None
        return Trivial(float(recorded["score"]), str(recorded.get("answer", "")))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what a reader of the scores has to know (`outcome_warnings`)."""
        reason = str(self.failures[0]["failure"]) if self.failures else ""
        return outcome_warnings(self.history, self.declared, self.trivial, reason)

    @property
    def handed_over(self) -> bool:
        """Return whether a program passed in data, partition or model, so that the configuration alone cannot recreate them."""
        model = self.config.get("model", {}).get("name") == HANDED_OVER
        before = (self.partition or {}).get("given")  # as version 0.1 recorded it
        return bool(self.config.get("data", {}).get("handed_over") or before or model)

    @property
    def seed(self) -> int | None:
        seed: int | None = self.config.get("run", {}).get("seed")
        return seed


def read_run(path: str | Path) -> RunData:
    """Read everything that a report needs of one run directory.

    Raises:
        ConfigError: not a run directory, no finished round, or an unreadable file.
    """
    folder = Path(path)
    require_one_run(folder)
    text = _read(folder / "config.toml", str, "")
    config = _parsed(folder / "config.toml", text)
    declared = _read(folder / DECLARED, parse_columns, Columns())
    declared = Columns(declared.own, built_in_task(config.get("task")))
    history = _table(folder, "history.csv", declared)
    declared.hide(_headers(folder / PRIVATE / "history.csv"))
    if not history:
        raise ConfigError(f"{folder} has no finished round yet: there is nothing to show")
    return RunData(
        path=folder,
        config=config,
        config_text=text,
        statement=read_statement(folder) if (folder / "statement.json").is_file() else None,
        history=history,
        layers=_table(folder, "layers.csv", declared),
        clients=_table(folder, "clients.csv", declared),
        participants=_table(folder, "participants.csv", declared),
        failures=_table(folder, "failures.csv", declared),
        summary=_read(folder / "summary.json", _object, {}),
        versions=_read(folder / "versions.json", _object, {}),
        partition=_read(folder / PRIVATE / "partition.json", _partition, None)
        or _read(folder / "partition.json", _partition, None),
        declared=declared,
    )


def _object(text: str) -> dict[str, Any]:
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError(f"it holds a {type(fields).__name__} and no object")
    return fields


def _partition(text: str) -> dict[str, Any]:
    """Return the label counts, a row for each listed client; version 0.1 has none for data that were passed in."""
    fields = _object(text)
    counts = fields.get("counts") or []
    rows = isinstance(counts, list) and all(isinstance(row, list) and len(row) == len(counts[0]) for row in counts)
    if not rows or not all(isinstance(n, int) for row in counts for n in row):
        raise ValueError("its counts are no table of whole numbers")
    if counts and not ({"listed", "kind", "sha256", "clients"} <= fields.keys() and len(fields["listed"]) == len(counts)):
        raise ValueError("what its counts are of is missing")
    return {**fields, "counts": counts}


def experiment_of(run: RunData) -> dict[str, Any]:
    """Return the configuration as `section.key: value`, without keys that differ between seeds of one experiment."""
    seeded = ("run.seed", "model.recorded.frozen")
    return {key: value for key, value in flat(without_free_keys(run.config)).items() if key not in seeded}


def grouped(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Return runs that differ only in their seed as groups, in the order of their first run."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(json.dumps(experiment_of(run), sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def group_names(groups: Sequence[Sequence[RunData]]) -> list[str]:
    """Return a short name for each group: the method, the data if they differ, and the fewest settings that distinguish them."""
    each = [experiment_of(group[0]) for group in groups]
    names, data = ([str(one.get(key, "run")) for one in each] for key in ("method.name", "data.name"))
    if len(set(data)) > 1:
        names = [f"{name}, {where}" for name, where in zip(names, data, strict=True)]
    others = {k for one in each for k in one} - {"method.name", "data.name"}
    keys = sorted(others, key=lambda k: (not k.startswith("method."), k != "privacy.epsilon", k))
    while len(set(names)) < len(names):
        more = {k: _with(names, each, k) for k in keys}
        best = max(keys, key=lambda k: len(set(more[k])), default="")
        if not best or len(set(more[best])) == len(set(names)):
            break
        names = more[best]
        keys.remove(best)
    return [name if names.count(name) == 1 else f"{name} ({groups[i][0].path.name})" for i, name in enumerate(names)]


def _with(names: list[str], each: list[dict[str, Any]], key: str) -> list[str]:
    """Return the names, with the setting `key` added to equal names whose settings differ."""
    added = []
    for name, one in zip(names, each, strict=True):
        values = [json.dumps(other.get(key), default=str) for n, other in zip(names, each, strict=True) if n == name]
        differs = len(set(values)) > 1 and key in one
        added.append(f"{name}, {key.rsplit('.', 1)[-1].replace('_', ' ')} {_value(one[key])}" if differs else name)
    return added


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return toml_values(text)
    except ConfigError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _read(path: Path, parse: Callable[[str], T], absent: T) -> T:
    if not path.is_file():
        return absent
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; restore the file if it is damaged, or use the version of fedveil that wrote it"
        ) from None


def _headers(table: Path) -> list[str]:
    header = _read(table, lambda text: next(csv.reader(text.splitlines()), []), list[str]())
    return [name for name in header if name != "round"]


def _table(folder: Path, name: str, columns: Columns) -> list[Row]:
    """Return a table with its private part; version 0.1 had all of it at the top."""
    public, private = (
        _read(part / name, lambda text: parse_table(name, text, columns), list[Row]()) for part in (folder, folder / PRIVATE)
    )
    return joined(name, public, private)
