"""The parts of every task: a loss, metrics, columns of the history, and what it needs of the data."""

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
    """One column of the history, declared once: tables, charts, pages and trackers take its words from here.

    Args:
        name: its key in a row. title: in plain words; by default the name as words.
        unit: what its values are, as beside an axis; by default the title.
        better: the direction in which a run is better, or None.
        kind: one `number` a round, or a list of one a `layer` or `client`; `text`, or the `index` of a round or client.
        share: values from 0 to 1, shown in percent.
        main: whether runs are compared by it.
        public: computed from what was released and from public configuration alone; otherwise it is a figure of a simulation,
            computed from private data without noise, and not for publication.
    """

    name: str
    title: str = ""
    unit: str = ""
    better: Literal["higher", "lower"] | None = None
    kind: Kind = "number"
    share: bool = False
    public: bool = False
    main: bool = False

    @property
    def words(self) -> str:
        """The title, as over a chart."""
        plain = self.title or self.header.replace("_", " ")
        return plain[:1].upper() + plain[1:]

    @property
    def phrase(self) -> str:
        """The title, as inside a sentence."""
        plain = self.words
        return plain if plain[1:2].isdigit() else plain[:1].lower() + plain[1:]

    @property
    def axis(self) -> str:
        """The unit, as beside an axis."""
        unit = self.unit or self.phrase
        return f"{unit} (%)" if self.share else unit

    @property
    def factor(self) -> float:
        """What values are multiplied by beside the axis."""
        return 100.0 if self.share else 1.0

    @property
    def sign(self) -> int:
        """-1 where a lower value is better, so that the sign times the value is better where it is higher."""
        return -1 if self.better == "lower" else 1

    def text(self, value: float | None, spread: float = math.nan) -> str:
        """A value as in a sentence, with its standard deviation where there is one; a dash where there is none."""
        if value is None or math.isnan(value):
            return "–"
        if self.share:
            return f"{100 * value:.1f} %" if math.isnan(spread) else f"{100 * value:.1f} ± {100 * spread:.1f} %"
        return f"{value:.4g}" if math.isnan(spread) else f"{value:.4g} ± {spread:.2g}"

    @property
    def header(self) -> str:
        """Its name in a table of its own kind: figures by layer go without `layer_`."""
        return self.name.removeprefix("layer_") if self.kind == "layer" else self.name


ACCURACY = Column("accuracy", "Accuracy", "accuracy", "higher", share=True)


@runtime_checkable
class HasColumns(Protocol):
    """A policy or an objective that declares the columns of its figures (see `HasMetrics`)."""

    @property
    def columns(self) -> Sequence[Column]:
        """The columns that it declares; figures of other names get a default."""
        ...


Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Of a class or a label."""
Evidence = tuple["Tensor", ...]
"""What a score is computed from, example by example: tensors [n, ...] of the same n."""


class Task(BaseModel):
    """What is learned: its constants, frozen and public; and its functions, of which a task of one's own needs only `losses`.

    A loss that is no mean over examples overrides `loss` instead, and has no record-level privacy.
    metrics: what `scores` returns, declared; runs are compared by the first. loss_unit: beside the axis of the loss.
    output_form: what the network has to give, in words. trivial_answer: what `trivial` scores, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    metrics: ClassVar[tuple[Column, ...]] = ()
    loss_unit: ClassVar[str] = "loss"
    output_form: ClassVar[str] = ""
    trivial_answer: ClassVar[str] = "an answer that is the same for all"

    name: str

    @property
    def by_example(self) -> bool:
        """Whether the loss of a batch is the mean of its examples' `losses`."""
        return type(self).losses is not Task.losses

    @property
    def own(self) -> bool:
        """Whether it is code of the user's own."""
        return not type(self).__module__.startswith("fedveil.tasks.")

    @property
    def constants(self) -> dict[str, Any]:
        """Its numbers, which must be public: of a built-in task those that were given, of one's own all of them."""
        shown = set(type(self).model_fields) if self.own else self.model_fields_set
        values = {key: getattr(self, key) for key in type(self).model_fields if key in shown}
        return {key: value for key, value in values.items() if not isinstance(value, str | bool | None)}

    @property
    def largest_weight(self) -> float:
        """The largest number that `example_weights` gives for any target; public."""
        return 1.0

    @property
    def main(self) -> Column:
        """The metric by which runs are compared; the loss where a task has no other."""
        return self.metrics[0] if self.metrics else Column("loss", "Loss", self.loss_unit, "lower")

    def check(self, info: Info) -> None:
        """Refuse data that the task cannot learn from.

        Raises:
            ConfigError: their targets are of another kind.
        """

    def wrong_targets(self, target: NDArray[Any]) -> str:
        """What is wrong with targets [n, ...] of the right shape and type, or an empty string."""
        return ""

    def outputs(self, info: Info) -> int:
        """Width of the network's last layer: one for each class, or for each number of the target."""
        return info.classes or int(np.prod(info.target.shape, dtype=int))

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of each example [n], from what the network gives [n, ...] and the targets [n, ...]."""
        raise ConfigError(f"task.name = {self.name!r} has no loss for each example: {type(self).__qualname__} lacks `losses`")

    def example_weights(self, target: Tensor) -> Tensor | None:
        """Return by how much `losses` weights each example [n], from its own target alone, or None where all count the same.

        DP-SGD takes these weights out of the clip, which would cut them off.
        """
        return None

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of a batch, one number."""
        return self.losses(output, target).mean()

    def losses_in_full(self, output: Tensor, target: Tensor) -> Tensor:
        """The `losses` [n], in float32 where the network gives half precision."""
        return self.losses(in_full(output), target)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the answers [n, ...] that the network's output stands for: by default the output itself."""
        return output

    def evidence(self, output: Tensor, target: Tensor) -> Evidence:
        """What evaluation keeps of a batch, example by example: by default output and target themselves."""
        return output, target

    def test_loss(self, *evidence: Tensor) -> float:
        """The loss of the whole test set, from what `evidence` kept."""
        return float(self.loss(*evidence))

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """The metrics by name, from what `evidence` kept of at least one example."""
        return {}

    def trivial(self, target: Tensor) -> float | None:
        """Return the main metric of the best answer that is the same for every example of a test with these targets [n, ...].

        A run whose score is no better says so. None, the default, compares with nothing.
        """
        return None

    def client_scores(self, offsets: NDArray[np.int64], *evidence: Tensor) -> list[float | None]:
        """The main metric of each client, whose examples are offsets[i] to offsets[i + 1]; None where it has none."""
        return [self._main_score(*(e[lo:hi] for e in evidence)) for lo, hi in pairwise(offsets)]

    def _main_score(self, *evidence: Tensor) -> float | None:
        if not len(evidence[0]):
            return None
        found = {"loss": self.test_loss(*evidence)} if not self.metrics else self.scores(*evidence)
        score = found[self.main.name]
        return None if np.isnan(score) else score


def in_full(output: Tensor) -> Tensor:
    """The output of a network, in float32 where it is in half precision: losses and scores are computed from that."""
    return output.float() if output.dtype.itemsize < 4 else output


def need_classes(task: str, info: Info, sides: int = 0) -> None:
    """Refuse data whose targets are not the numbers of classes.

    Args:
        sides: how many an example's target has: 0 for one number, 1 for a sequence, 2 for a picture.
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
    """How targets of too many numbers may become the number of a class."""
    if sides or len(info.target.shape) != 1:
        return ""
    return " (give y[:, 0])" if info.target.shape == (1,) else " (give y.argmax(1) if their rows are one-hot)"


def need_quantities(task: str, info: Info, shape: str = "") -> None:
    """Refuse data whose targets are the numbers of classes.

    Args:
        shape: what each has to be besides, for the message.
    """
    if info.classes:
        raise ConfigError(
            f"task.name = {task!r} learns {shape or 'quantities'}, and the targets of {info.name} are {info.classes} classes: "
            f"choose another task, such as 'classification', or targets in float32"
        )


def need_weights(key: str, weights: Sequence[float] | None, info: Info, what: str, count: int) -> None:
    """Refuse weights, where there are any, that are not one for each of the data's `count` classes or labels."""
    if weights is not None and len(weights) != count:
        raise ConfigError(f"task.{key} has {len(weights)} weights; {info.name} has {count} {what}: give one each")


def weights_of(weights: Sequence[float], target: Tensor) -> Tensor:
    """Return public weights as a tensor in float64, where the targets are."""
    import torch

    return torch.tensor(weights, dtype=torch.float64, device=target.device)
