"""Use of a trained model: predictions for new data, as arrays or as a table, and files that other programs load."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedveil.data.dataset import Dataset, standardise
from fedveil.data.own.data_source import TableSource
from fedveil.data.own.files import read_table
from fedveil.data.own.frames import column_of
from fedveil.data.own.new_rows import TableEncoding
from fedveil.errors import ConfigError, DataError
from fedveil.experiment.data_card import CARD
from fedveil.ledger.files import write_output

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.data.catalogue import Info
    from fedveil.experiment.config import Config
    from fedveil.tasks.task import Task

_BATCH = 1024
_FORMATS = (".pt", ".onnx")


def _table_encoding(path: Path, config: Config) -> TableEncoding:
    """Return how the run in a directory encodes the rows of a table.

    Raises:
        ConfigError: the run was not trained on a table, or on features made of one.
    """
    source = config.data.source
    if config.data.features is not None:
        raise ConfigError(
            f"{path} was trained on data.features = {config.data.features!r}: make these features of the examples, and pass them "
            f"as an array to run.predict in Python"
        )
    if isinstance(source, TableSource):
        return TableEncoding(source.features, source)
    origin = json.loads((path / CARD).read_text(encoding="utf-8")).get("origin") or {}
    if not origin.get("features"):
        raise ConfigError(f"{path} was not trained on a table: pass an array of examples to run.predict in Python")
    return TableEncoding.of_origin(origin)


def _is_table(new: Any) -> bool:
    """Return whether new data have named columns."""
    return isinstance(new, Mapping) or hasattr(new, "columns") or hasattr(new, "column_names")


@dataclass(frozen=True)
class TrainedModel:
    """A trained network with the public facts about its data.

    Args:
        module: the network, in evaluation mode. path, config: of its run.
    """

    module: nn.Module
    path: Path
    config: Config
    task: Task
    info: Info

    def outputs(self, new: Any) -> Tensor:
        """Return the network's output [n, ...] for examples in the units of the data: a table, an array, or a test set.

        Raises:
            DataError: examples of another shape, or rows that cannot be encoded.
        """
        if isinstance(new, Dataset):
            x = new.x_test
        else:
            x = _table_encoding(self.path, self.config)(new) if _is_table(new) else np.asarray(new)
        shape = self.info.input_shape
        if x.shape[1:] != shape:
            raise DataError(f"the examples have shape {x.shape[1:]}, and the model takes {shape}: give an array [n, *{shape}]")
        inputs = torch.from_numpy(standardise(x, self.info))
        with torch.no_grad():
            return torch.cat([self.module(part) for part in torch.split(inputs, _BATCH)])

    def predictions(self, new: Any) -> NDArray[Any]:
        """Return the task's predictions [n, ...] for new examples."""
        found: NDArray[Any] = self.task.predictions(self.outputs(new)).numpy()
        return found

    def probabilities(self, new: Any) -> NDArray[Any]:
        """Return the probability of each class or label [n, C, ...] for new examples.

        Raises:
            ConfigError: the task has no probabilities.
        """
        found = self.task.probabilities(self.outputs(new))
        if found is None:
            raise ConfigError(f"task.name = {self.task.name!r} has no probabilities: take run.predict")
        return found.numpy()

    def table(self, new: Any) -> dict[str, list[Any]]:
        """Return predictions, and probabilities where the task has them, as columns: one row for each row of a table."""
        output, names = self.outputs(new), self.info.target.names
        values, chances = self.task.predictions(output), self.task.probabilities(output)
        if values.dim() == 1:
            labels = names if self.info.classes else ()
            columns = {"prediction": [labels[one] for one in values.tolist()] if labels else values.tolist()}
        else:
            labels = names or tuple(str(i) for i in range(values.shape[1]))
            columns = {f"prediction {name}": values[:, i].tolist() for i, name in enumerate(labels)}
        if chances is not None:
            kinds = names or tuple(str(i) for i in range(chances.shape[1]))
            columns |= {f"probability {name}": chances[:, i].tolist() for i, name in enumerate(kinds)}
        return columns

    def write_predictions(self, file: Path, out: Path, columns: tuple[str, ...] = ()) -> int:
        """Write predictions for the rows of a CSV, TSV or Parquet file as CSV, and return their number.

        Args:
            columns: columns of the file that are copied, such as an id.

        Raises:
            DataError: the file cannot be read, or a row of it cannot be encoded.
        """
        encoding = _table_encoding(self.path, self.config)
        wanted = list(dict.fromkeys([*encoding.columns, *columns]))
        table = read_table(file, wanted, [*encoding.card.categories, *(set(columns) - set(encoding.columns))])
        copied = {name: column_of(table, name) for name in columns}
        shown = {name: np.where(one.absent, "", one.values.astype(str)).tolist() for name, one in copied.items()}
        found = self.table(table)
        count = len(next(iter(found.values())))
        everything = {"row": list(range(1, count + 1)), **shown, **found}
        text = io.StringIO(newline="")
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(everything)
        rows.writerows(zip(*everything.values(), strict=True))
        write_output(out, text.getvalue().encode(), private=True)
        return count

    def export(self, out: str | Path) -> Path:
        """Write the model for other programs and return the path.

        Args:
            out: .pt for the state dict of the network; .onnx for a graph from examples in the units of the data (of a table:
                its encoded features) to probabilities, or to predictions where the task has none.

        Raises:
            ConfigError: another suffix, a missing package, or a network that ONNX cannot express.
        """
        target = Path(out)
        if target.suffix.lower() not in _FORMATS:
            raise ConfigError(f"cannot export to {str(out)!r}: give a file name that ends in {' or '.join(_FORMATS)}")
        content = io.BytesIO()
        if target.suffix.lower() == ".pt":
            torch.save(self.module.state_dict(), content)
        else:
            self._to_onnx(content)
        write_output(target, content.getvalue())
        return target

    def _to_onnx(self, content: io.BytesIO) -> None:
        missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"export to ONNX needs {' and '.join(missing)}: pip install 'fedveil[onnx]', or export to .pt")
        tokens = bool(self.info.vocabulary)
        example = torch.zeros((2, *self.info.input_shape), dtype=torch.int64 if tokens else torch.float32)
        answer = "predictions" if self.task.probabilities(self.module(example)) is None else "probabilities"
        names: dict[str, Any] = {"input_names": ["examples"], "output_names": [answer]}
        shapes = ({0: torch.export.Dim("n")},)
        try:
            with warnings.catch_warnings(action="ignore"):  # of the exporter about its own parts
                graph = _FromUnits(self).eval()
                program = torch.onnx.export(graph, (example,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
            content.write(program.model_proto.SerializeToString())  # type: ignore[union-attr]
        except Exception as error:
            reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{type(self.module).__name__} cannot be exported to ONNX ({reason}): export to .pt") from error


class _FromUnits(nn.Module):
    """The network between normalisation of its inputs and the task's answer."""

    mean: Tensor
    std: Tensor

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        info, self.module, self.task, self.tokens = trained.info, trained.module, trained.task, bool(trained.info.vocabulary)
        column = (-1,) + (1,) * (len(info.input_shape) - 1)
        mean, std = (np.asarray(part, np.float32).reshape(column) * np.float32(info.scale) for part in (info.mean, info.std))
        self.register_buffer("mean", torch.from_numpy(mean))
        self.register_buffer("std", torch.from_numpy(std))

    def forward(self, examples: Tensor) -> Tensor:
        output = self.module(examples if self.tokens else (examples - self.mean) / self.std)
        found: Tensor | None = self.task.probabilities(output)
        return self.task.predictions(output) if found is None else found
