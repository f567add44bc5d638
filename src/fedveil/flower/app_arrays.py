"""The model of somebody's Flower app: the arrays of an instruction as one flat vector, what training moved, and back.

What is released is chosen from the instruction alone, which the server knows: every array of floating-point numbers, except those
that count batches. Everything else, such as integer buffers, is sent as it was received. Names, order, shapes and types of what
is sent are those of the instruction, whatever a train function answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.errors import ConfigError, UpdateRefused
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

UNTOUCHED = ("num_batches_tracked",)
"""Last parts of names of arrays that are no parameters; Flower's FedAvg turns them from integers to floats."""

_LARGEST, _HEADER = 16, 4096
"""Bytes of a number, and of what precedes them: more is not opened."""


@dataclass(frozen=True)
class AppArrays:
    """The arrays that a round starts from, by name.

    Args:
        untouched: last parts of names of arrays that are sent as they were received, whatever their type.
    """

    arrays: Mapping[str, NDArray[Any]]
    untouched: tuple[str, ...] = UNTOUCHED

    @classmethod
    def of(cls, record: Any, untouched: Sequence[str] = UNTOUCHED) -> AppArrays:
        """Those of an ArrayRecord, copied.

        Raises:
            ConfigError: there is none to train.
        """
        found = cls({name: array.numpy() for name, array in record.items()}, tuple(untouched))
        if not found._trained:
            raise ConfigError(f"the model has no array of floating-point numbers to release; it has {list(found.arrays)[:6]}")
        return found

    @property
    def _trained(self) -> list[str]:
        return [n for n, a in self.arrays.items() if a.dtype.kind == "f" and n.rpartition(".")[2] not in self.untouched]

    @cached_property
    def layout(self) -> Layout:
        """The layout of what is released."""
        return Layout.of({name: self.arrays[name].shape for name in self._trained})

    def update(self, content: Any) -> Tensor:
        """What training moved [d], from the content of a train function's reply.

        Raises:
            UpdateRefused: the reply has no such arrays.
        """
        try:
            (record,) = content.array_records.values()
            large = [n for n in self.layout.names if len(record[n].data) > _LARGEST * self.arrays[n].size + _HEADER]
            after = {name: record[name].numpy() for name in self.layout.names if not large}
        except Exception as problem:
            raise UpdateRefused(f"the reply has not the arrays of the instruction ({type(problem).__name__})") from problem
        wrong = large or [n for n, a in after.items() if a.dtype.kind != "f" or a.shape != self.arrays[n].shape]
        if wrong:
            raise UpdateRefused(f"these arrays of the reply have another shape than they had, or no floats: {wrong[:6]}")
        with np.errstate(all="ignore"):
            moved = [after[n].astype(np.float64) - self.arrays[n].astype(np.float64) for n in self.layout.names]
            return torch.from_numpy(np.concatenate([part.reshape(-1).astype(np.float32) for part in moved]))

    @property
    def nothing(self) -> Tensor:
        """An update of zero [d], in the place of one that may not leave, on the CPU whatever an app has set."""
        return torch.from_numpy(np.zeros(self.layout.dimension, np.float32))

    def moved(self, step: Tensor) -> Any:
        """The arrays after a released step [d], as an ArrayRecord in the order of the instruction."""
        parts = dict(zip(self.layout.names, self.layout.split(step), strict=True))
        return self._record({name: self._stepped(name, part.numpy()) for name, part in parts.items()})

    def as_sent(self, record: Any) -> Any:
        """What a strategy made of such arrays, in their types, and with everything that is not released as it was."""
        return self._record({name: record[name].numpy().astype(self.arrays[name].dtype) for name in self.layout.names})

    def _stepped(self, name: str, step: NDArray[np.float32]) -> NDArray[Any]:
        before = self.arrays[name]
        with np.errstate(all="ignore"):
            return np.asarray(before.astype(np.float64) + step.reshape(before.shape)).astype(before.dtype)

    def _record(self, changed: Mapping[str, NDArray[Any]]) -> Any:
        from flwr.app import Array, ArrayRecord

        return ArrayRecord({name: Array(np.asarray(changed.get(name, kept))) for name, kept in self.arrays.items()})
