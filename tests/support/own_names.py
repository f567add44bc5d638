"""Names that a test registers, taken out again."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def forgotten_after(*registries: MutableMapping[str, Any]) -> Iterator[None]:
    """What is registered within is unknown afterwards."""
    before = [set(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, names in zip(registries, before, strict=True):
            for name in set(registry) - names:
                del registry[name]
