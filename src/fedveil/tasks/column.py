"""What a column of a run's history is: its words, its unit, its direction, and whom it may be shown to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

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
