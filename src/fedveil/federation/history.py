"""A run's history: records with a public and a private half, and the columns that say what their values are."""

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
"""A value for each column of one row of a table."""


@dataclass(frozen=True, eq=False)
class Record(Mapping[str, Any]):
    """One round of a run's history, read as one row; a private value comes before a public one of the same name.

    Args:
        public: made from what the run's view shows (see `measures.SeenRound`), the public test set and the ledger.
        private: everything else. `failures` says why each client that was left out failed, and `by_client` holds the figures
            that a method takes of each client.
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
"""What the rows of a table are about."""
PLANNED = (
    Column("noise_norm", "Expected noise", "L2 norm", public=True),
    Column("layer_noise_std", "Noise", "noise std per coordinate", kind="layer", public=True),
    Column("clip", "Clip norm", public=True),
    Column("example_clip", "Clip norm of each example's gradient", public=True),
    Column("expected_batch", "Expected batch", "examples a step", public=True),
    Column("coordinates", "Coordinates sent", "coordinates an upload", public=True),
    Column("uplink_bytes", "Sent to the server", "bytes a round", "lower", public=True),
    Column("layer_clip", "Clip norm", kind="layer", public=True),
)
"""Figures of the plans of a round."""
COLUMNS = (
    Column("participants", "Clients that took part", "clients", public=True),  # whose release is in the round
    Column("spent_clients", "Clients whose budget is spent", "clients", "lower", public=True),
    Column("failed", "Clients left out", "clients", "lower"),
    Column("failures", "Who was left out, and why", kind="text"),
    Column("skipped", "Why nothing was released", kind="text", public=True),
    *PLANNED,
    Column("update_norm", "Released update with its noise", "L2 norm", public=True),
    Column("cumulative_noise_norm", "Expected noise, added up over the rounds", "L2 norm", public=True),
    Column("epsilon_spent", "Proven ε of the releases so far", "ε", "lower", public=True),
    Column("seconds", "Time", "seconds a round", "lower"),
)
"""What every round can have; methods add their own (see `HasMetrics`), which are private unless they are declared public."""


ALL_FAILED = "every client of a round failed"
"""How the reason begins for which a simulation ends after such a round."""


def all_failed(row: Mapping[str, Any]) -> bool:
    """Return whether every client of the round failed, which only a process that trained them knows: its row has their loss."""
    failed, loss = row.get("failed") or 0, row.get("train_loss")
    known = "train_loss" in row and (loss is None or math.isnan(loss))
    return known and failed > 0 and failed >= row.get("participants", 0)


def of_task(task: Task) -> tuple[Column, ...]:
    """What is measured of a task: losses, metrics on the test set, and the main metric by client."""
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
        Column(f"{noisy}_std", "Standard deviation of that noise", main.unit, "lower", share=main.share, public=True),
        Column("noisy_examples", "Clients' own examples that were counted, with noise", "examples", public=True),
    )


def built_in_columns(task: Task | None = None) -> dict[str, Column]:
    """The columns that every run has, and those of its task, by name."""
    return {column.name: column for column in (*INDEX, *COLUMNS, *(of_task(task) if task else ()))}


def in_client_table(column: str) -> str:
    """The name in `clients.csv` of a column by client."""
    return "personal" if column.startswith("personal_") else column.removeprefix("client_")


def _metric(column: Column) -> str:
    return column.name.removeprefix("test_")


class Columns(Mapping[str, Column]):
    """The columns of one run by name: those of every run and of its task, and the `own` ones that it declares.

    No declaration changes the words of a built-in column; an undeclared name gets a default. Without a task, a run learns
    classes unless `own` has a main column.
    """

    def __init__(self, own: Iterable[Column] = (), task: Task | None = None) -> None:
        self.own = tuple(own)
        built_in = built_in_columns(task or (None if any(column.main for column in self.own) else Classification()))
        self._known = built_in | {column.name: column for column in self.own} | built_in

    @property
    def main(self) -> Column:
        """By which runs are compared."""
        return next(column for column in self._known.values() if column.main)

    @property
    def personal(self) -> Column:
        """The same of the clients' personal models."""
        return self[f"mean_personal_{_metric(self.main)}"]

    @property
    def personal_on_test_set(self) -> Column:
        """The same, on the whole test set."""
        return self[f"mean_personal_test_{_metric(self.main)}"]

    @property
    def noisy(self) -> Column:
        """The same on the clients' own examples, with noise."""
        return self[f"noisy_{_metric(self.main)}"]

    def noisy_text(self, history: Sequence[Mapping[str, Any]]) -> str:
        """Its last value with the standard deviation of its noise, or nothing."""
        name = self.noisy.name
        found = [(row[name], row[f"{name}_std"]) for row in history if row.get(name) is not None]
        return self.noisy.text(*found[-1]) if found else ""

    @property
    def comparable(self) -> list[str]:
        """By which runs can be compared: the main metric, the other scores of the task, the main metric of personal models."""
        scores = [c.name for c in self._known.values() if c.name.startswith("test_") and c.better and c is not self.main]
        return [self.main.name, *scores, self.personal.name, self.personal_on_test_set.name]

    @property
    def together(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """What is drawn in one chart, under a short name: its title and its columns."""
        main = self.main
        others = [c for c in self._known.values() if c.name.startswith("test_") and c not in (main, self["test_loss"])]
        beside = [c for c in others if c.better is None and c.unit == main.unit]
        scores = [c for c in others if c.share and c not in beside]
        apart = [c for c in others if not c.share and c not in beside]
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
        return self._known.get(name) or Column(name)

    def __iter__(self) -> Any:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def hide(self, names: Iterable[str]) -> None:
        """Mark the columns of values that the run keeps in its private half."""
        self._known |= {name: replace(self[name], public=False) for name in names if self[name].public}

    def of(self, name: str, value: Any) -> Column:
        """The column of a value in a row; an undeclared list is one over layers."""
        found = self[name]
        return replace(found, kind="layer") if isinstance(value, list) and name not in self._known else found

    def by_layer(self, header: str) -> Column:
        """The column of that name in the table of layers."""
        known = (c for c in self._known.values() if c.kind == "layer" and c.header == header)
        return next(known, Column(header, kind="layer"))


def columns_of(task: Task, own: Iterable[Column] = ()) -> Columns:
    """The columns of a run with this task, and `own` ones of its method.

    Raises:
        ConfigError: the method declares a column that every run has.
    """
    own = tuple(own)
    if taken := [column.name for column in own if column.name in built_in_columns(task)]:
        raise ConfigError(f"the method declares the column {taken[0]!r}, which every run has: choose another name")
    return Columns((*(() if type(task) is Classification else of_task(task)), *own))


def declared(task: Task, objective: Client, policy: object) -> Columns:
    """The columns of a run with this task, objective and policy; what an objective measures is private, as its states are."""
    measured = objective.columns if isinstance(objective, HasColumns) else ()
    released = policy.columns if isinstance(policy, HasColumns) else ()
    return columns_of(task, (*released, *(replace(c, public=False) for c in measured)))


def reserved(method: Method, objective: Client, columns: Columns) -> set[str]:
    """Names that a figure of an objective cannot have, but those that it declares: of columns, and their headers in tables."""
    own = {column.name for column in objective.columns} if isinstance(objective, HasColumns) else set()
    taken = {name for column in columns.values() if column.name not in own for name in (column.name, column.header)}
    free = {column.name for column in PLANNED} if reads_private_data(method) else set()
    return {*taken, "by_client", "failures"} - free


def reads_private_data(method: Method) -> bool:
    """Return whether the plans of a method read private data."""
    return getattr(method, "variant", "proven") == "published"
