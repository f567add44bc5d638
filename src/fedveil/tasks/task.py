"""The base of all tasks: losses, metrics, columns of the history, and requirements on the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fedveil.data.catalogue import Info
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


Kind = Literal["index", "number", "layer", "client", "text"]


@dataclass(frozen=True)
class Column:
    """Column of the history; tables, charts, pages and trackers take its texts from here.

    Args:
        name: key in a row. title: in plain words; by default the name as words.
        unit: label of an axis; by default the title.
        better: the direction in which a run is better, or None.
        kind: one `number` per round, or a list with one per `layer` or `client`; `text`, or the `index` of a round or client.
        share: values from 0 to 1, shown in percent.
        chance: for a share, the score of a random order; it is shown as 0.677 instead, on an axis from it to 1.
        main: whether runs are compared by it.
        public: computed only from releases and public configuration; otherwise it is a simulation's figure, computed from
            private data without noise, and must not be published.
    """

    name: str
    title: str = ""
    unit: str = ""
    better: Literal["higher", "lower"] | None = None
    kind: Kind = "number"
    share: bool = False
    public: bool = False
    main: bool = False
    chance: float | None = None

    @property
    def words(self) -> str:
        """Return the title, as above a chart."""
        plain = self.title or self.header.replace("_", " ")
        return plain[:1].upper() + plain[1:]

    @property
    def phrase(self) -> str:
        """Return the title, as inside a sentence."""
        plain = self.words
        return plain if plain[1:2].isdigit() else plain[:1].lower() + plain[1:]

    @property
    def axis(self) -> str:
        """Return the unit, as the label of an axis."""
        unit = self.unit or self.phrase
        if self._bytes:
            return f"kB{unit.removeprefix('bytes')}"
        return f"{unit} (%)" if self.percent else unit

    @property
    def percent(self) -> bool:
        """Return whether values are shown in percent."""
        return self.share and self.chance is None

    @property
    def factor(self) -> float:
        """Return the factor of values on an axis."""
        return 100.0 if self.percent else 1e-3 if self._bytes else 1.0

    @property
    def _bytes(self) -> bool:
        return self.unit.startswith("bytes")

    @property
    def limits(self) -> tuple[float, float] | None:
        """Return the ends of an axis that shows the whole range of a share; other values have none."""
        if not self.share:
            return None
        return (0.0, 100.0) if self.chance is None else (self.chance, 1.0)

    @property
    def sign(self) -> int:
        """Return -1 if a lower value is better, else 1, so that a higher product of sign and value is better."""
        return -1 if self.better == "lower" else 1

    def text(self, value: float | None, spread: float = math.nan) -> str:
        """Format a value for a sentence, with its standard deviation if given; a missing value is a dash."""
        if value is None or math.isnan(value):
            return "–"
        if self.percent:
            return f"{100 * value:.1f} %" if math.isnan(spread) else f"{100 * value:.1f} ± {100 * spread:.1f} %"
        if self.chance is not None:
            return f"{value:.3f}" if math.isnan(spread) else f"{value:.3f} ± {spread:.3f}"
        return f"{value:.4g}" if math.isnan(spread) else f"{value:.4g} ± {spread:.2g}"

    @property
    def header(self) -> str:
        """Return the name in a table of columns of the same kind, which omits the prefix `layer_`."""
        return self.name.removeprefix("layer_") if self.kind == "layer" else self.name


ACCURACY = Column("accuracy", "Accuracy", "accuracy", "higher", share=True)


@runtime_checkable
class HasColumns(Protocol):
    """Policy or client that declares the columns of its figures (see `HasMetrics`)."""

    @property
    def columns(self) -> Sequence[Column]:
        """Return the declared columns; figures of other names get a default."""
        ...


Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Weight of a class or a label."""
Evidence = tuple["Tensor", ...]
"""Input of a score, by example: tensors [n, ...] of the same n."""


class Task(BaseModel):
    """Learning task: public, frozen constants, and functions. A user-defined task needs only `losses`.

    A task whose loss is not a mean over examples overrides `loss` instead, and has no record-level privacy.
    metrics: columns that `scores` returns; runs are compared by the first. loss_unit: label of the loss axis.
    output_form: the required output of the network, in words. trivial_answer: the answer that `trivial` scores, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    metrics: ClassVar[tuple[Column, ...]] = ()
    loss_unit: ClassVar[str] = "loss"
    output_form: ClassVar[str] = ""
    trivial_answer: ClassVar[str] = "an answer that is the same for all"

    name: str

    @property
    def by_example(self) -> bool:
        """Return whether the loss of a batch is the mean of its examples' `losses`."""
        return type(self).losses is not Task.losses

    @property
    def is_user_defined(self) -> bool:
        """Return whether the task is user-defined."""
        return not type(self).__module__.startswith("fedveil.tasks.")

    @property
    def constants(self) -> dict[str, Any]:
        """Return the public numbers of the task: all of a user-defined task, only the explicitly set ones of a built-in task."""
        names = set(type(self).model_fields) if self.is_user_defined else self.model_fields_set
        values = {key: getattr(self, key) for key in type(self).model_fields if key in names}
        return {key: value for key, value in values.items() if not isinstance(value, str | bool | None)}

    @property
    def largest_weight(self) -> float:
        """Return the largest number that `example_weights` gives for any target; it is public."""
        return 1.0

    @property
    def main(self) -> Column:
        """Return the metric by which runs are compared, or the loss if the task has no metrics."""
        return self.metrics[0] if self.metrics else Column("loss", "Loss", self.loss_unit, "lower")

    def check(self, info: Info) -> None:
        """Refuse data that the task cannot learn from.

        Raises:
            ConfigError: the targets are of another kind.
        """

    def wrong_targets(self, target: NDArray[Any]) -> str:
        """Return what is wrong with targets [n, ...] of the right shape and type, or an empty string."""
        return ""

    def outputs(self, info: Info) -> int:
        """Return the width of the network's last layer: one per class, or per number of the target."""
        return info.classes or int(np.prod(info.target.shape, dtype=int))

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each example [n], from the network's output [n, ...] and the targets [n, ...]."""
        raise ConfigError(f"task.name = {self.name!r} has no loss for each example: {type(self).__qualname__} lacks `losses`")

    def example_weights(self, target: Tensor) -> Tensor | None:
        """Return the weight of each example [n] in `losses`, which depends on its target alone, or None for equal weights.

        DP-SGD scales the clip of each example by these weights, since a common clip would remove them.
        """
        return None

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch, one number."""
        return self.losses(output, target).mean()

    def losses_in_full(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the `losses` [n], computed in float32 if the output has half precision."""
        return self.losses(in_full(output), target)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the predictions [n, ...] for the network's output: by default the output itself."""
        return output

    def probabilities(self, output: Tensor) -> Tensor | None:
        """Return the probability of each class or label [n, C, ...], or None (the default) if the task has none."""
        return None

    def evidence(self, output: Tensor, target: Tensor) -> Evidence:
        """Return what evaluation collects from a batch, by example: by default output and target themselves."""
        return output, target

    def test_loss(self, *evidence: Tensor) -> float:
        """Return the loss of the whole test set, from the collected `evidence`."""
        return float(self.loss(*evidence))

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Return the metrics by name, from the collected `evidence` of at least one example."""
        return {}

    def trivial(self, target: Tensor) -> float | None:
        """Return the main metric of the best constant answer for test targets [n, ...], or None (the default) for no comparison.

        A run whose score is no better reports it.
        """
        return None

    def client_scores(self, offsets: NDArray[np.int64], *evidence: Tensor) -> list[float | None]:
        """Return the main metric of each client, with examples offsets[i] to offsets[i + 1]; None if it is undefined."""
        return [self._main_score(*(e[lo:hi] for e in evidence)) for lo, hi in pairwise(offsets)]

    def _main_score(self, *evidence: Tensor) -> float | None:
        if not len(evidence[0]):
            return None
        scores = {"loss": self.test_loss(*evidence)} if not self.metrics else self.scores(*evidence)
        score = scores[self.main.name]
        return None if np.isnan(score) else score


def in_full(output: Tensor) -> Tensor:
    """Convert half-precision output to float32, in which losses and scores are computed."""
    return output.float() if output.dtype.itemsize < 4 else output


def need_classes(task: str, info: Info, sides: int = 0) -> None:
    """Refuse data whose targets are not class numbers.

    Args:
        sides: dimensions of an example's target: 0 for one number, 1 for a sequence, 2 for a picture.
    """
    if not info.classes:
        raise ConfigError(
            f"task.name = {task!r} learns classes, and the targets of {info.name} are quantities{_flat(info, sides)}: choose "
            f"another task, such as 'regression', or data with classes"
        )
    if len(info.target.shape) != sides:
        wanted = {0: "one class", 1: "a sequence of classes", 2: "a picture of classes"}[sides]
        raise ConfigError(
            f"task.name = {task!r} needs {wanted} for each example; those of {info.name} have {info.target.shape}"
            f"{_flat(info, sides)}"
        )


def _flat(info: Info, sides: int) -> str:
    """Return advice on converting targets of several numbers to class numbers, or an empty string."""
    if sides or len(info.target.shape) != 1:
        return ""
    return " (give y[:, 0])" if info.target.shape == (1,) else " (give y.argmax(1) if their rows are one-hot)"


def need_quantities(task: str, info: Info, shape: str = "") -> None:
    """Refuse data whose targets are class numbers.

    Args:
        shape: the required form of a target, for the message.
    """
    if info.classes:
        raise ConfigError(
            f"task.name = {task!r} learns {shape or 'quantities'}, and the targets of {info.name} are {info.classes} classes: "
            f"choose another task, such as 'classification', or targets in float32"
        )


def need_weights(key: str, weights: Sequence[float] | None, info: Info, what: str, count: int) -> None:
    """Refuse weights, if given, whose number is not `count`, that of the data's classes or labels."""
    if weights is not None and len(weights) != count:
        raise ConfigError(f"task.{key} has {len(weights)} weights; {info.name} has {count} {what}: give one each")


def weights_of(weights: Sequence[float], target: Tensor) -> Tensor:
    """Return public weights as a float64 tensor on the targets' device."""
    import torch

    return torch.tensor(weights, dtype=torch.float64, device=target.device)
