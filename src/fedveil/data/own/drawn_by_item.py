"""Items that transforms draw random numbers for: what is drawn for an item follows from that item alone."""

from __future__ import annotations

import datetime
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import mtrand

from fedveil.data.own.casts import array_of
from fedveil.data.seeding import turn
from fedveil.errors import DataError

if TYPE_CHECKING:
    from hashlib import blake2b

_SEED_BYTES = 48
"""16 for each generator: numpy's and Python's have the same algorithm, and would draw the same from the same seed."""
_PUBLIC = hashlib.blake2b(b"fedveil: before each item", digest_size=_SEED_BYTES).digest()
_PROBED = 64
"""About how many items, at the least, are read once more to see whether they depend on others."""
_Numbers = tuple[bytes, bytes, bytes]
_FIX = (
    "draw from the global generators of torch (on the CPU), numpy or random without seeding them, which is done here for each "
    "item, or give data already transformed"
)
_SCALARS = (bool, int, float, complex, str, bytes, datetime.date, datetime.time, datetime.timedelta, type(None))


def items_by_themselves(dataset: Any) -> list[Any]:
    """Read all items, each as if it were the only one.

    The global generators of torch (on the CPU), numpy and random are at one public state before each item. Where reading it
    moves one of them, all are seeded from the content of what was read, and the item is read again: draws differ from item to
    item, but neither the order nor what other items are or draw has a bearing on them. Afterwards the generators are as before.

    Raises:
        DataError: an item differs when it is read again, so that others, or a generator of the data set's own, decide about it;
            or it seeds a global generator itself.
    """
    count = len(dataset)
    with _public_state() as start:
        probed = {i: _content(_first(dataset, i, start)[0]) for i in range(0, count, max(1, count // _PROBED))}
        return [_item(dataset, i, start, probed.get(i)) for i in range(count)]


def drawing(function: Callable[[Any], Any], argument: Any) -> tuple[Any, bool]:
    """Return the function's result with the generators in the public state, and whether it drew from any of them."""
    with _public_state() as start:
        made = function(argument)
        return made, _next_numbers() != start


def read_by_row(table: Any) -> Any:
    """A table whose rows a function of the program makes (`set_transform` of `datasets`), as columns; others as they are.

    Of a whole column such a function could make of one example what follows from others, or draw for all one after the other.

    Raises:
        DataError: as `items_by_themselves`; or rows that do not have the same columns.
    """
    form = getattr(table, "format", None)
    if not (isinstance(form, Mapping) and form.get("type") == "custom"):
        return table
    rows = items_by_themselves(table)
    names = list(rows[0] if rows else table.column_names)
    if not all(isinstance(row, Mapping) and set(row) == set(names) for row in rows):
        raise DataError(
            f"the transform of the {type(table).__name__} does not make the same columns of all rows: let it make "
            f"{', '.join(map(str, names))} of each"
        )
    return {name: [row[name] for row in rows] for name in names}


def _item(dataset: Any, i: int, start: _Numbers, probed: bytes | None) -> Any:
    """Item `i`, read from the public state and again if it draws. probed: its content when it was read before, if it was."""
    item, after = _first(dataset, i, start)
    draws = after != start
    if probed is None and not draws:
        return item
    content = _content(item)
    if probed not in (None, content):
        raise DataError(
            f"item {i} of the {type(dataset).__name__} differs when it is read again, with the global generators in the same "
            f"state: it draws from a generator of its own, or depends on what was read before, so that one example would change "
            f"others: {_FIX}"
        )
    if not draws:
        return item
    _seed(content)
    item = dataset[i]
    if any(one == other != before for one, other, before in zip(after, _next_numbers(), start, strict=True)):
        raise DataError(
            f"item {i} of the {type(dataset).__name__} seeds a global generator itself: seeded by its place, one example less "
            f"would change all behind it: {_FIX}"
        )
    _seed(_PUBLIC)
    return item


def _first(dataset: Any, i: int, start: _Numbers) -> tuple[Any, _Numbers]:
    """Item `i` as read from the public state, and what would be drawn next; the generators are in the public state again."""
    item = dataset[i]
    after = _next_numbers()
    _seed(_PUBLIC)
    return item, after


@contextmanager
def _public_state() -> Iterator[_Numbers]:
    """The generators are in the public state, of which the next numbers are given, and afterwards as they were; in turns.

    Meanwhile numpy's global functions draw from another bit generator, which can be seeded whatever the program's own is.
    """
    import torch

    with turn():
        torchs, randoms = torch.default_generator.get_state(), random.getstate()
        generator, numpys = mtrand.get_bit_generator(), np.random.get_state(legacy=False)  # noqa: NPY002 : transforms draw from it
        mtrand.set_bit_generator(np.random.MT19937(0))
        try:
            _seed(_PUBLIC)
            start = _next_numbers()
            _seed(_PUBLIC)
            yield start
        finally:
            torch.default_generator.set_state(torchs)
            random.setstate(randoms)
            mtrand.set_bit_generator(generator)
            np.random.set_state(numpys)  # noqa: NPY002 : with a normal that is held back


def _seed(seed: bytes) -> None:
    """torch is given no more than its CPU's generator, not the GPUs' too."""
    import torch

    torchs, numpys, randoms = (seed[place : place + 16] for place in (0, 16, 32))
    torch.default_generator.manual_seed(int.from_bytes(torchs[:8], "little"))
    np.random.seed(np.frombuffer(numpys, np.uint32))  # noqa: NPY002 : what transforms draw from
    random.seed(int.from_bytes(randoms, "little"))


def _next_numbers() -> _Numbers:
    """Return the next 16 bytes of each generator, which show whether anything was drawn since a known state.

    Drawing them and seeding again takes a third of the time of comparing whole states.
    """
    import torch

    words: Any = mtrand.get_bit_generator().random_raw(4)
    drawn = torch.empty(2, dtype=torch.int64, device="cpu").random_(generator=torch.default_generator)
    return drawn.numpy().tobytes(), words.tobytes(), random.getrandbits(128).to_bytes(16, "little")


def _content(item: Any) -> bytes:
    """A digest of what an item holds, wherever that lies in memory, as long as a seed."""
    digest = hashlib.blake2b(digest_size=_SEED_BYTES)
    _add(digest, item)
    return digest.digest()


def _add(digest: blake2b, value: Any) -> None:
    if isinstance(value, Mapping):
        value = [[key, one] for key, one in value.items()]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OT":
        value = list(value.ravel())
    if isinstance(value, tuple | list):
        digest.update(f"{len(value)} parts ".encode())
        for one in value:
            _add(digest, one)
        return
    kind, content = _bytes(value)
    digest.update(f"{len(content)} bytes of {kind} ".encode() + content)


def _bytes(value: Any) -> tuple[str, bytes]:
    """Return type and bytes of a value; an unknown type, which is refused later if it is used, has no bytes."""
    if isinstance(value, _SCALARS) and not isinstance(value, np.generic):
        return type(value).__name__, repr(value).encode()
    try:
        array = np.asarray(value) if hasattr(value, "getbands") or isinstance(value, np.ndarray) else array_of(value, "an item")
    except DataError:
        return type(value).__name__, b""
    return f"{array.dtype} {array.shape}", array.tobytes()
