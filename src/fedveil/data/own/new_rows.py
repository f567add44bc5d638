"""Encoding of new rows of a table like the rows on which a model was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.own.cards import TableCard, canonical, checked_card, is_number
from fedveil.data.own.frames import TableColumn, column_of, encode_column, encoded
from fedveil.errors import DataError

_NAMED = 5
"""Number of rows that an error names."""


@dataclass(frozen=True)
class TableEncoding:
    """The columns that a model takes, and the public facts by which they are encoded."""

    columns: tuple[str, ...]
    card: TableCard

    @classmethod
    def of_origin(cls, origin: Mapping[str, Any]) -> TableEncoding:
        """Return the encoding that a data card records: its `origin` has the names of the encoded features."""
        categories = {name: tuple(values) for name, values in origin["categories"].items()}
        made = {f"{name}={canonical(value)}": name for name, values in categories.items() for value in values}
        columns = dict.fromkeys(made.get(feature, feature) for feature in origin["features"])
        indicators = tuple(origin.get("indicators", ()))
        for name in indicators:
            columns.pop(f"{name} is missing", None)
        facts = {"categories": categories, "missing": origin["missing"], "indicators": indicators}
        return cls(tuple(columns), checked_card(TableCard, target="", **facts))

    def __call__(self, table: Any) -> NDArray[np.float32]:
        """Return the encoded features [rows, k], before normalisation; the table needs no target.

        Raises:
            DataError: a column is missing, or a row cannot be encoded; the message names the rows.
        """
        try:
            return encoded(table, self.card, self.columns)[0]
        except DataError as problem:
            columns = [column_of(table, name) for name in self.columns]
            rows = sorted({row for column in columns for row in self._unusable(column)})
            if not rows:
                raise
            named = ", ".join(str(row + 1) for row in rows[:_NAMED]) + f" and {len(rows) - _NAMED} more" * (len(rows) > _NAMED)
            raise DataError(
                f"row{'s' * (len(rows) > 1)} {named} (the first is 1) cannot be encoded, so there are no predictions: {problem}"
            ) from None

    def _unusable(self, column: TableColumn) -> list[int]:
        """Return the rows whose value in this column cannot be encoded."""
        if self._encodes(column):
            return []
        if column.kind == "text" and column.name not in self.card.categories:
            texts, absent = column.values.tolist(), column.absent.tolist()
            odd = [row for row, text in enumerate(texts) if not absent[row] and not is_number(text)]
            gaps = [row for row, gap in enumerate(absent) if gap and column.name not in self.card.missing]
            return odd + gaps or [*range(len(texts))]
        parts = ((row, slice(row, row + 1)) for row in range(len(column.values)))
        return [
            row
            for row, part in parts
            if not self._encodes(replace(column, values=column.values[part], absent=column.absent[part]))
        ]

    def _encodes(self, column: TableColumn) -> bool:
        try:
            encode_column(column, self.card)
        except DataError:
            return False
        return True
