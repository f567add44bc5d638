"""A run's history: records with a public and a private half, and the columns that describe their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError
from fedveil.tasks.classification import Classification
from fedveil.tasks.task import Column, HasColumns

if TYPE_CHECKING:
    from fedveil.methods.method import Method
    from fedveil.tasks.task import Task
    from fedveil.training.local import Client

Row = dict[str, Any]
"""Values of one table row by column name."""


@dataclass(frozen=True, eq=False)
class Record(Mapping[str, Any]):
    """One round of a run's history, read as one row; a private value shadows a public one of the same name.

    Args:
        public: values derived from what the run's view shows (see `server.VisibleRound`), the public test set and the ledger.
        private: everything else. `failures` maps each failed client to the reason, and `by_client` holds a method's figures of
            each client.
    """

    public: Row
    private: Row = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.private[name] if name in self.private else self.public[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.public | self.private)

    def __len__(self) -> int:
        return len(self.public | self.private)


INDEX = (
    Column("round", "Round, from 0", kind="index", public=True),
    Column("client", "Client, from 0", kind="index", public=True),
    Column("layer", "Layer", kind="text", public=True),
    Column("failure", "Reason", kind="text"),
)
"""Columns that identify the rows of a table."""
_PLANNED = (
    Column("noise_norm", "Expected noise", "L2 norm", public=True),
    Column("layer_noise_std", "Noise", "noise std per coordinate", kind="layer", public=True),
    Column("clip", "Clip norm", public=True),
    Column("example_clip", "Clip norm of each example's gradient", public=True),
    Column("expected_batch", "Expected batch", "examples a step", public=True),
    Column("coordinates", "Coordinates sent", "coordinates an upload", public=True),
    Column("uplink_bytes", "Sent to the server", "bytes per round", "lower", public=True),
    Column("layer_clip", "Clip norm", kind="layer", public=True),
)
"""Columns of figures that follow from a round's plans."""
COLUMNS = (
    Column("participants", "Clients that took part", "clients", public=True),  # clients with a release in the round
    Column("spent_clients", "Clients whose budget is spent", "clients", "lower", public=True),
    Column("failed", "Clients left out", "clients", "lower"),
    Column("failures", "Who was left out, and why", kind="text"),
    Column("skipped", "Why nothing was released", kind="text", public=True),
    *_PLANNED,
    Column("update_norm", "Released update with its noise", "L2 norm", public=True),
    Column("cumulative_noise_norm", "Expected noise, added up over the rounds", "L2 norm", public=True),
    Column("epsilon_spent", "Proven ε of the releases so far", "ε", "lower", public=True),
    Column("seconds", "Time", "seconds per round", "lower"),
)
"""Columns that every round can have; those that methods add (see `HasMetrics`) are private unless declared public."""


ALL_FAILED = "every client of a round failed"
"""Prefix of the reason for which a simulation ends after such a round."""


def all_failed(row: Mapping[str, Any]) -> bool:
    """Return whether every client of the round failed; only a simulation knows, since its rows have a training loss."""
    failed, loss = row.get("failed") or 0, row.get("train_loss")
    measured = "train_loss" in row and (loss is None or math.isnan(loss))
    return measured and failed > 0 and failed >= row.get("participants", 0)


def _of_task(task: Task) -> tuple[Column, ...]:
    """Return a task's columns: losses, metrics on the test set, and the main metric by client."""
    main, noisy = task.main, f"noisy_{task.main.name}"
    test = [Column("test_loss", "Test loss", task.loss_unit, "lower", public=True, main=not task.metrics)]
    for metric in task.metrics:
        title = f"Test {main.phrase}" if metric is main else metric.title
        test.append(replace(metric, name=f"test_{metric.name}", title=title, public=True, main=metric is main))
    return (
        Column("train_loss", "Training loss", task.loss_unit, "lower"),
        *test,
        replace(main, name=f"client_{main.name}", title=f"{main.words} by client", kind="client"),
        replace(main, name=f"personal_{main.name}", title=f"{main.words} of the personal models by client", kind="client"),
        replace(main, name=f"mean_personal_{main.name}", title=f"{main.words} of the personal models"),
        replace(main, name=f"mean_personal_test_{main.name}", title=f"{main.words} of the personal models on the test set"),
        replace(main, name=noisy, title=f"{main.words} on clients' own examples, with noise", public=True),
        Column(f"{noisy}_std", "Standard deviation of that noise", main.unit, "lower", share=main.percent, public=True),
        Column("noisy_examples", "Clients' own examples that were counted, with noise", "examples", public=True),
    )


def built_in_columns(task: Task | None = None) -> dict[str, Column]:
    """Return the columns of every run, and those of the task, by name."""
    return {column.name: column for column in (*INDEX, *COLUMNS, *(_of_task(task) if task else ()))}


def in_client_table(column: str) -> str:
    """Return the name that a per-client column has in `clients.csv`."""
    return "personal" if column.startswith("personal_") else column.removeprefix("client_")


def _metric(column: Column) -> str:
    return column.name.removeprefix("test_")


class Columns(Mapping[str, Column]):
    """Columns of one run by name: the built-in ones, those of its task, and the `own` ones that the method declares.

    A declaration cannot change a built-in column's texts; an undeclared name gets a default column. Without a task, the run is a
    classification unless `own` has a main column.
    """

    def __init__(self, own: Iterable[Column] = (), task: Task | None = None) -> None:
        self.own = tuple(own)
        built_in = built_in_columns(task or (None if any(column.main for column in self.own) else Classification()))
        self._by_name = built_in | {column.name: column for column in self.own} | built_in

    @property
    def main(self) -> Column:
        """Return the main metric's column, by which runs are compared."""
        return next(column for column in self._by_name.values() if column.main)

    @property
    def personal(self) -> Column:
        """Return the main metric's column for personal models."""
        return self[f"mean_personal_{_metric(self.main)}"]

    @property
    def personal_on_test_set(self) -> Column:
        """Return the main metric's column for personal models on the whole test set."""
        return self[f"mean_personal_test_{_metric(self.main)}"]

    @property
    def noisy(self) -> Column:
        """Return the main metric's column on the clients' own examples, with noise."""
        return self[f"noisy_{_metric(self.main)}"]

    def noisy_text(self, history: Sequence[Mapping[str, Any]]) -> str:
        """Return the last noisy score with the standard deviation of its noise, as text; empty without one."""
        name = self.noisy.name
        scores = [(row[name], row[f"{name}_std"]) for row in history if row.get(name) is not None]
        return self.noisy.text(*scores[-1]) if scores else ""

    @property
    def comparable(self) -> list[str]:
        """Return names of columns to compare runs by: the main metric, other scores of the task, personal models' main metric."""
        scores = [c.name for c in self._by_name.values() if c.name.startswith("test_") and c.better and c is not self.main]
        return [self.main.name, *scores, self.personal.name, self.personal_on_test_set.name]

    @property
    def together(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return the charts by short name, each with its title and the columns it shows."""
        main = self.main
        others = [c for c in self._by_name.values() if c.name.startswith("test_") and c not in (main, self["test_loss"])]
        beside = [c for c in others if c.better is None and c.unit == main.unit]
        scores = [c for c in others if c.percent and c not in beside]
        apart = [c for c in others if not c.percent and c not in beside]
        charts = {
            _metric(main): (
                replace(main, title=main.words.removeprefix("Test ")).words,
                (main, self.personal, self.personal_on_test_set, self.noisy, *beside),
            ),
            "loss": ("Loss", (self["test_loss"], self["train_loss"])),
            "update": ("The released update and its noise", (self["update_norm"], self["noise_norm"])),
            "scores": ("Other scores", scores),
            **{_metric(c): (c.words, (c,)) for c in apart},
        }
        return {short: (title, tuple(c.name for c in columns)) for short, (title, columns) in charts.items() if columns}

    def __getitem__(self, name: str) -> Column:
        return self._by_name.get(name) or Column(name)

    def __iter__(self) -> Any:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def hide(self, names: Iterable[str]) -> None:
        """Mark columns as private, because the run keeps their values in its private half."""
        self._by_name |= {name: replace(self[name], public=False) for name in names if self[name].public}

    def of(self, name: str, value: Any) -> Column:
        """Return the column of a value in a row; an undeclared list gets a per-layer column."""
        column = self[name]
        return replace(column, kind="layer") if isinstance(value, list) and name not in self._by_name else column

    def by_layer(self, header: str) -> Column:
        """Return the per-layer column with this header."""
        columns = (c for c in self._by_name.values() if c.kind == "layer" and c.header == header)
        return next(columns, Column(header, kind="layer"))


def columns_of(task: Task, own: Iterable[Column] = ()) -> Columns:
    """Return the columns of a run with this task and the method's `own` columns.

    Raises:
        ConfigError: the method declares a column that every run has.
    """
    own = tuple(own)
    if taken := [column.name for column in own if column.name in built_in_columns(task)]:
        raise ConfigError(f"the method declares the column {taken[0]!r}, which every run has: choose another name")
    return Columns((*(() if type(task) is Classification else _of_task(task)), *own))


def declared(task: Task, objective: Client, policy: object) -> Columns:
    """Return the columns of a run; what an objective measures is private, because its states are."""
    measured = objective.columns if isinstance(objective, HasColumns) else ()
    released = policy.columns if isinstance(policy, HasColumns) else ()
    return columns_of(task, (*released, *(replace(c, public=False) for c in measured)))


def reserved(method: Method, objective: Client, columns: Columns) -> set[str]:
    """Return names that an objective's figure cannot have, except declared ones: columns and their headers in tables."""
    own = {column.name for column in objective.columns} if isinstance(objective, HasColumns) else set()
    taken = {name for column in columns.values() if column.name not in own for name in (column.name, column.header)}
    free = {column.name for column in _PLANNED} if reads_private_data(method) else set()
    return {*taken, "by_client", "failures"} - free


def reads_private_data(method: Method) -> bool:
    """Return whether a method's plans depend on private data."""
    return getattr(method, "variant", "proven") == "published"
