"""Messages between the pool's main process and its workers: what goes through a pipe, and what stays in shared memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from fedveil.engines.shared_arena import LEAST, Array, There, WorkerArena
from fedveil.federation.round import ClientTask, Outcome
from fedveil.release.sealed import ELSEWHERE, Contribution, SealedUpload

if TYPE_CHECKING:
    from fedveil.mechanism.plan import Plan, Raw, Released
    from fedveil.training.local import State

EMPTY = torch.empty(0)
"""Stands in for a vector that lies in shared memory."""
INTEGERS = torch.empty(0, dtype=torch.int64)
"""The same for a contribution of integers."""
_STAND_INS = {"floats": EMPTY, "integers": INTEGERS, "elsewhere": ELSEWHERE}
_NAMES = {id(tensor): name for name, tensor in _STAND_INS.items()}

Values = tuple[Any, ...]
"""What the fields of an object hold, in their order: it takes a tenth of the time to pickle."""

_of_task = attrgetter("client", "weight", "private", "buffers")
_of_outcome = attrgetter(*(field.name for field in fields(Outcome)))
_of_contribution = attrgetter(*(field.name for field in fields(Contribution)))


def task_values(task: ClientTask, state: State) -> Values:
    """A client's part in a round, without what it shares with the others. state: of its policy."""
    return state, *_of_task(task)


def tasks_of(table: Sequence[Values], released: Released, plan: Plan | Raw | None) -> list[ClientTask]:
    """The tasks, with what they share. plan: of the round, where its uploads are summed; else each client plans for itself."""
    return [
        ClientTask(client, released, weight, plan, state if plan is None else {}, *more) for state, client, weight, *more in table
    ]


def without_vectors(released: Released) -> Released:
    """What was released, with a stand-in for each vector [d], which workers read in shared memory."""
    previous, update = (None if vector is None else EMPTY for vector in (released.previous, released.public_update))
    return replace(released, model=EMPTY, previous=previous, public_update=update)


def with_vectors(slim: Released, vectors: torch.Tensor) -> Released:
    """What was released, its vectors the rows [3, d] of shared memory."""
    previous = None if slim.previous is None else vectors[1]
    return replace(slim, model=vectors[0], previous=previous, public_update=None if slim.public_update is None else vectors[2])


def outcome_values(outcome: Outcome, release: SealedUpload | Contribution | None, sealed: torch.Tensor) -> Values:
    """An outcome with that release; a contribution is given by its values, too, `sealed` in place of its vector."""
    client, _, *more = _of_outcome(outcome)
    if isinstance(release, Contribution):
        return client, tuple(sealed if part is release.sealed else part for part in _of_contribution(release)), *more
    return client, release, *more


def outcome_of(values: Values) -> Outcome:
    """The outcome."""
    client, release, *more = values
    return Outcome(client, Contribution(*release) if isinstance(release, tuple) else release, *more)


def pack(value: Any, place: Callable[[Array], int | None] | None = None) -> bytes:
    """Pickle for a pipe between our own processes.

    Tensors go by value (torch's own way keeps a file open for each), or, if they are large and `place` tells an offset in the
    slots, as a note of where they lie.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, place).dump(value)
    return buffer.getvalue()


def unpack(message: bytes, there: There) -> Any:
    """What was packed; `there` finds the tensors that lie in slots."""
    return _Unpickler(message, there).load()


def reply(answer: list[Values] | Outcome | Exception | None, arena: WorkerArena | None = None) -> bytes:
    """A worker's message: the size of what it has, or would have, put into its slot [8 bytes], and the answer."""
    packed = pack(answer, arena.place if arena is not None else None)
    return (arena.needed if arena is not None else 0).to_bytes(8, "little") + packed


def read_reply(message: bytes, there: There) -> tuple[int, Any]:
    """(size, answer) of a worker's message."""
    return int.from_bytes(message[:8], "little"), unpack(message[8:], there)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, place: Callable[[Array], int | None] | None) -> None:
        super().__init__(buffer, protocol=5)
        self._place = place

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if id(value) in _NAMES:
            return _stand_in, (_NAMES[id(value)],)
        array = value.detach().cpu().numpy()
        offset = self._place(array) if self._place is not None and array.nbytes >= LEAST else None
        if offset is None:
            return torch.from_numpy, (array,)
        return _there, (offset, array.dtype.str, array.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: bytes, there: There) -> None:
        super().__init__(io.BytesIO(message))
        self._found = there

    def find_class(self, module: str, name: str) -> Any:
        return self._found if (module, name) == (__name__, _there.__name__) else _class(module, name)


@cache
def _class(module: str, name: str) -> Any:
    return pickle.Unpickler(io.BytesIO()).find_class(module, name)


def _stand_in(name: str) -> torch.Tensor:
    return _STAND_INS[name]


def _there(offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    raise LookupError("stands for the `there` of `unpack`")
