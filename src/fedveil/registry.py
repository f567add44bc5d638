"""Things by name: fedveil's own, each imported when it is first looked up, and those that a project of one's own registers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from fedveil.errors import ConfigError, unknown

Kind = TypeVar("Kind")


class Registry(MutableMapping[str, Kind]):
    """A mapping from names to what they stand for; whether a name is known is told without importing it.

    Args:
        key: of the configuration that names one, such as "method.name". what: it is, such as "method".
        entries: fedveil's own, or the places "module:attribute" where they are.
        own: what a user does about one of their own, said where a name is unknown.
    """

    def __init__(self, key: str, what: str, entries: Mapping[str, Kind | str], own: str = "") -> None:
        self.key, self.what, self.own = key, what, own
        self._entries: dict[str, Kind | str] = dict(entries)
        self._places = {name: place for name, place in entries.items() if isinstance(place, str)}

    def __getitem__(self, name: str) -> Kind:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            found: Kind = getattr(importlib.import_module(module), attribute)
            self._entries[name] = entry = found
        return entry

    def __setitem__(self, name: str, kind: Kind) -> None:
        self._entries[name] = kind

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._places.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str, key: str = "") -> Kind:
        """What has this name.

        Args:
            key: that gave the name, if it is another than the registry's.

        Raises:
            ConfigError: nothing has it.
        """
        if name not in self:
            raise unknown(key or self.key, name, self.what, self, self.own)
        return self[name]

    def add(self, name: str, kind: Kind, code: Any) -> None:
        """Register one of a project's own, which the class or function `code` makes; the same module may do so again.

        Raises:
            ConfigError: another has the name.
        """
        module, _, title = self._places.get(name, "").partition(":")
        if name in self and module != code.__module__:
            owner = f"{title} of {module}" if title else f"a {self.what} of fedveil"
            raise ConfigError(f"the name {name!r} of {code.__qualname__} belongs to {owner}: choose another")
        self._entries[name], self._places[name] = kind, f"{code.__module__}:{code.__qualname__}"
