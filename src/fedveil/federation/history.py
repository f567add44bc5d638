"""The columns of a run's history: what a row can hold, in which words, and which file of the run directory it goes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedveil.training.column import Column, HasColumns

if TYPE_CHECKING:
    from fedveil.training.local import Objective

Record = dict[str, Any]
"""One row of history: a value for each column that the round has, see `Columns`.

Besides columns it holds `failures`, why each client that was left out failed, and `by_client`, the figures that a method takes
of each client that took part.
"""

INDEX = (
    Column("round", "Round, from 0", kind="index"),
    Column("client", "Client, from 0", kind="index"),
    Column("layer", "Layer", kind="text"),
    Column("failure", "Reason", kind="text", private=True),
)
"""What the rows of a table are about."""
COLUMNS = (
    Column("participants", "Clients that took part", "clients"),
    Column("spent_clients", "Clients whose budget is spent", "clients", "lower"),
    Column("failed", "Clients left out", "clients", "lower", private=True),
    Column("failures", "Who was left out, and why", kind="text", private=True),
    Column("skipped", "Why nothing was released", kind="text"),
    Column("noise_norm", "Expected noise", "L2 norm"),
    Column("layer_noise_std", "Noise", "noise std per coordinate", kind="layer"),
    Column("clip", "Clip norm"),
    Column("coordinates", "Coordinates sent", "coordinates an upload"),
    Column("uplink_bytes", "Sent to the server", "bytes a round", "lower"),
    Column("layer_clip", "Clip norm", kind="layer"),
    Column("update_norm", "Released update with its noise", "L2 norm"),
    Column("cumulative_noise_norm", "Expected noise, added up over the rounds", "L2 norm"),
    Column("train_loss", "Training loss", "cross-entropy", "lower", private=True),
    Column("seconds", "Time", "seconds a round", "lower"),
    Column("test_loss", "Test loss", "cross-entropy", "lower"),
    Column("test_accuracy", "Test accuracy", "accuracy", "higher", share=True),
    Column("test_precision", "Precision", "macro mean", "higher", share=True),
    Column("test_recall", "Recall", "macro mean", "higher", share=True),
    Column("test_f1", "F1 score", "macro mean", "higher", share=True),
    Column("client_accuracy", "Accuracy by client", "accuracy", "higher", "client", share=True, private=True),
    Column("personal_accuracy", "Accuracy of the personal models by client", "accuracy", "higher", "client", True, True),
    Column("mean_personal_accuracy", "Accuracy of the personal models", "accuracy", "higher", share=True, private=True),
)
"""What every round can have; methods add their own (see `HasMetrics`)."""
TOGETHER = {
    "accuracy": ("Accuracy", ("test_accuracy", "mean_personal_accuracy")),
    "loss": ("Loss", ("test_loss", "train_loss")),
    "update": ("The released update and its noise", ("update_norm", "noise_norm")),
    "scores": ("Precision, recall, F1", ("test_precision", "test_recall", "test_f1")),
}
"""Columns that are drawn in one chart, and its title, under a short name."""
CLIENT_TABLE = {"client_accuracy": "accuracy", "personal_accuracy": "personal"}
"""The columns by client, under their names in `clients.csv`."""


class Columns(Mapping[str, Column]):
    """The columns of one run by name: those of every run, and the method's `own`; an undeclared name gets a default."""

    def __init__(self, own: Iterable[Column] = ()) -> None:
        self.own = tuple(own)
        self._known = {column.name: column for column in (*INDEX, *COLUMNS, *self.own)}

    def __getitem__(self, name: str) -> Column:
        return self._known.get(name) or Column(name)

    def __iter__(self) -> Any:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, name: str, value: Any) -> Column:
        """The column of a value in a row; an undeclared list is one over layers."""
        found = self[name]
        return replace(found, kind="layer") if isinstance(value, list) and name not in self._known else found

    def by_layer(self, header: str) -> Column:
        """The column of that name in the table of layers."""
        known = (c for c in self._known.values() if c.kind == "layer" and c.header == header)
        return next(known, Column(header, kind="layer"))


def declared(objective: Objective, policy: object) -> Columns:
    """The columns of a run with this objective and policy; what an objective measures is private, as its states are."""
    measured = objective.columns if isinstance(objective, HasColumns) else ()
    released = policy.columns if isinstance(policy, HasColumns) else ()
    return Columns((*(replace(c, private=True) for c in measured), *released))
