"""Items with random transforms: the numbers drawn for an item depend on that item alone."""

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
"""Bytes of seed, 16 per generator: numpy and Python use the same algorithm, and would draw the same numbers from one seed."""
_PUBLIC = hashlib.blake2b(b"fedveil: before each item", digest_size=_SEED_BYTES).digest()
_PROBED = 64
"""Least number of items, roughly, that are read again to see whether they depend on others."""
_Numbers = tuple[bytes, bytes, bytes]
_FIX = (
    "draw from the global generators of torch (on the CPU), numpy or random without seeding them, which is done here for each "
    "item, or give data already transformed"
)
_SCALARS = (bool, int, float, complex, str, bytes, datetime.date, datetime.time, datetime.timedelta, type(None))


def items_by_themselves(dataset: Any) -> list[Any]:
    """Read all items, each as if it were the only one.

    Before each item, the global generators of torch (on the CPU), numpy and random are set to one public state. If reading the
    item changes one of them, all are seeded from the item's content and the item is read again. So draws differ from item to
    item, but do not depend on the order or on other items. Afterwards the generators are restored.

    Raises:
        DataError: an item differs when it is read again, so it depends on other items or on a generator inside the data set; or
            it seeds a global generator itself.
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
    """Return a table whose rows are made by a user's function (`set_transform` of `datasets`) as columns; other tables unchanged.

    If it got a whole column, such a function could let one example depend on others, or draw for all of them in sequence.

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
    """Read item `i` from the public state, and again if it draws. probed: its content from an earlier read, if any."""
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
    """Return item `i` read from the public state, and the numbers that would be drawn next; restore the public state."""
    item = dataset[i]
    after = _next_numbers()
    _seed(_PUBLIC)
    return item, after


@contextmanager
def _public_state() -> Iterator[_Numbers]:
    """Set the generators to the public state, yield their next numbers, and restore the generators; one thread at a time.

    Meanwhile numpy's global functions draw from another bit generator, since the program's own may not be seedable.
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
    """Seed the generators; for torch only that of the CPU."""
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
    """Return a digest of an item's content, independent of memory addresses, with the length of a seed."""
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
