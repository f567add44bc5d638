"""The columns of a run's history: what a row can hold, in which words, and which file of the run directory it goes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedveil.accounting.types import View
from fedveil.training.column import Column, HasColumns

if TYPE_CHECKING:
    from fedveil.methods.base import Method, Setting
    from fedveil.training.local import Objective

Record = dict[str, Any]
"""One row of history: a value for each column that the round has, see `Columns`.

Besides columns it holds `failures`, why each client that was left out failed, and `by_client`, the figures that a method takes
of each client that took part.
"""

INDEX = (
    Column("round", "Round, from 0", kind="index", public=True),
    Column("client", "Client, from 0", kind="index", public=True),
    Column("layer", "Layer", kind="text", public=True),
    Column("failure", "Reason", kind="text"),
)
"""What the rows of a table are about."""
COLUMNS = (
    Column("participants", "Clients that took part", "clients", public=True),
    Column("spent_clients", "Clients whose budget is spent", "clients", "lower", public=True),
    Column("failed", "Clients left out", "clients", "lower"),
    Column("failures", "Who was left out, and why", kind="text"),
    Column("skipped", "Why nothing was released", kind="text", public=True),
    Column("noise_norm", "Expected noise", "L2 norm", public=True),
    Column("layer_noise_std", "Noise", "noise std per coordinate", kind="layer", public=True),
    Column("clip", "Clip norm", public=True),
    Column("coordinates", "Coordinates sent", "coordinates an upload", public=True),
    Column("uplink_bytes", "Sent to the server", "bytes a round", "lower", public=True),
    Column("layer_clip", "Clip norm", kind="layer", public=True),
    Column("update_norm", "Released update with its noise", "L2 norm", public=True),
    Column("cumulative_noise_norm", "Expected noise, added up over the rounds", "L2 norm", public=True),
    Column("epsilon_spent", "Proven ε of the releases so far", "ε", "lower", public=True),
    Column("train_loss", "Training loss", "cross-entropy", "lower"),
    Column("seconds", "Time", "seconds a round", "lower", public=True),
    Column("test_loss", "Test loss", "cross-entropy", "lower", public=True),
    Column("test_accuracy", "Test accuracy", "accuracy", "higher", share=True, public=True),
    Column("test_precision", "Precision", "macro mean", "higher", share=True, public=True),
    Column("test_recall", "Recall", "macro mean", "higher", share=True, public=True),
    Column("test_f1", "F1 score", "macro mean", "higher", share=True, public=True),
    Column("client_accuracy", "Accuracy by client", "accuracy", "higher", "client", share=True),
    Column("personal_accuracy", "Accuracy of the personal models by client", "accuracy", "higher", "client", share=True),
    Column("mean_personal_accuracy", "Accuracy of the personal models", "accuracy", "higher", share=True),
)
"""What every round can have; methods add their own (see `HasMetrics`), which are private unless they are declared public."""
_COUNTED = ("participants", "uplink_bytes", "seconds", "skipped")
"""What tells how many clients took part in a round, as the running time does, and nothing of a model."""
_NOISED = ("noise_norm", "cumulative_noise_norm", "layer_noise_std")
"""What tells it too, where each client brings noise of its own."""
_PLANNED = (*_NOISED, "clip", "layer_clip", "coordinates", "uplink_bytes")
"""What is chosen by a plan."""
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

    def hiding(self, names: Iterable[str]) -> Columns:
        """The same columns, of which these are private."""
        found = Columns(self.own)
        found._known |= {name: replace(self[name], public=False) for name in names}
        return found

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
    return Columns((*released, *(replace(c, public=False) for c in measured)))


def hidden(method: Method, s: Setting, columns: Columns) -> set[str]:
    """The public columns that are private in this run, because of its method, its sampling or its view."""
    found = set(_PLANNED) if getattr(method, "variant", "proven") == "published" else set()  # its plans read private data
    if s.scope.view is View.FINAL:  # figures of the models before the last, which nobody is to see
        found |= {c.name for c in columns.values() if c not in INDEX and c.name not in (*_COUNTED, "epsilon_spent")}
    if s.sampling == "poisson" and s.scope.view is not View.SERVER:
        brought = s.example_clip is not None or s.min_survivors is not None
        found |= {*_COUNTED, *(_NOISED if brought else ())}
    return {name for name in found if columns[name].public}
