"""TensorBoard's event files, by the writer that comes with torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from fedveil.ledger.files import owner_only_folder
from fedveil.run.run_directory import present
from fedveil.run.tracking import Begun, epsilons, numbers, settings
from fedveil.statement.statement_layout import to_markdown

if TYPE_CHECKING:
    from fedveil.federation.history import Columns, Row


class TensorBoard:
    """The tracker (see `trackers.tensorboard`)."""

    name = "TensorBoard"

    def __init__(self, path: str | Path | None) -> None:
        self._path = path

    def begin(self, begun: Begun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = begun.path / "tensorboard" if self._path is None else Path(self._path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        owner_only_folder(folder)  # it holds private figures
        fresh, done = not any(folder.glob("events.*")), len(begun.history)
        self._begun, self._last = begun, dict[str, float]()
        self._writer: Any = SummaryWriter(str(folder), purge_step=None if fresh or not done else done - 1)
        if fresh or not done:
            config = tomli_w.dumps(present(begun.config))
            self._writer.add_text("configuration", f"```toml\n{config}```")
            self._writer.add_text("privacy statement", to_markdown(begun.statement))
            for key, epsilon in epsilons(begun.statement).items():
                self._writer.add_scalar(key, epsilon, 0)
        for record in begun.history if fresh else begun.history[-1:]:
            self.round(record)
        self._writer.flush()

    def round(self, record: Row) -> None:
        step = record["round"]
        columns = self._begun.columns
        values = numbers(record, self._begun.layers, columns)
        for key, value in values.items():
            self._writer.add_scalar(key if "/" in key else f"history/{key}", value, step)
        for key in (key for key in record if columns[key].kind == "client"):
            known = [value for value in record[key] if value is not None]
            if known:
                self._writer.add_histogram(f"clients/{key}", np.asarray(known), step)
        self._last |= {key: value for key, value in values.items() if key.startswith("test_")}
        self._writer.flush()

    def end(self, status: str) -> None:
        self._writer.add_text("columns", _described(self._begun.columns))
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in settings(self._begun).items()}
        reached = epsilons(self._begun.statement) | {f"last/{key}": value for key, value in self._last.items()}
        self._writer.add_hparams(plain, {f"hparams/{key}": v for key, v in reached.items()}, run_name=".")
        self._writer.close()


def _described(columns: Columns) -> str:
    """What the names of the scalars mean, as a Markdown table."""
    numbers = [column for column in columns.values() if column.kind in ("number", "layer")]
    rows = [f"| {c.name} | {c.words} | {c.axis} | {c.better or ''} | {'' if c.public else 'private'} |" for c in numbers]
    return "\n".join(["| name | what | unit | better | |", "| --- | --- | --- | --- | --- |", *rows])
