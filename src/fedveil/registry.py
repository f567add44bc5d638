"""Registries of methods, tasks and other kinds by name: of fedveil, of distributions and of plugins; imported on lookup."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import cache, cached_property
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from fedveil.errors import PLUGIN_FILES, ConfigError, FedveilError, unknown

Kind = TypeVar("Kind")
_log = logging.getLogger(__name__)

TABLES = (
    "fedveil.report",
    "fedveil.papers.ladp_fl",
    "fedveil.papers.fedglp_adp",
    "fedveil.papers.convergent_dp",
    "fedveil.papers.fedanc",
    "fedveil.papers.aldp_fl",
    "fedveil.papers.utility",
    "fedveil.deploy",
)
"""Modules of fedveil with a table `REGISTERED`, from "KIND.NAME" to a place; importing one imports nothing else."""

_GROUP = "fedveil"
"""The group of entry points of other distributions, which have the same names and values as these tables."""

_OLD_TRACKERS = "fedveil.trackers"
"""The group of trackers in 0.2, which is read through 0.3."""

_KINDS = ("method", "task", "model", "data", "attack", "chart", "measure", "engine", "tracker", "command", "files")


@cache
def built_in(kind: str) -> Mapping[str, str]:
    """Return the places of fedveil's own entries of a kind by name, without those of packages that are not installed."""
    found: dict[str, str] = {}
    for table in TABLES:
        try:
            registered = importlib.import_module(table).REGISTERED
        except ModuleNotFoundError:  # the papers, or the deployment, are not installed
            continue
        found |= {name.partition(".")[2]: place for name, place in registered.items() if name.startswith(f"{kind}.")}
    return found


@cache
def _points() -> tuple[EntryPoint, ...]:
    points = tuple(entry_points(group=_GROUP))
    for point in points:
        kind, _, name = point.name.partition(".")
        if kind not in _KINDS or not name:
            kinds = ", ".join(_KINDS)
            _log.warning(
                "entry point %r of %s is not used: its name must be KIND.NAME, with a KIND of %s", point.name, owner(point), kinds
            )
    return points


def installed(kind: str) -> dict[str, list[EntryPoint]]:
    """Return the entries of other distributions of a kind, by name; nothing is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in _points():
        name = point.name.partition(".")
        if name[0] == kind and name[2]:
            found.setdefault(name[2], []).append(point)
    for point in entry_points(group=_OLD_TRACKERS) if kind == "tracker" else ():
        if point.dist is None or point.dist.name != "fedveil":
            found.setdefault(point.name, []).append(point)
    return found


def distributions_of(modules: Iterable[str]) -> list[Distribution]:
    """Return the distributions that register something in these modules."""
    return [point.dist for module in modules for point in _points() if point.module == module and point.dist is not None]


def owner(point: EntryPoint) -> str:
    """Return the distribution of an entry point, with its version."""
    return "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"


@cache
def registered_files(pattern: str) -> Mapping[str, Path]:
    """Return the files with that pattern, such as "presets/*/*.toml", in the packages that are registered as files.

    A file's name is its path below the first folder, such as METHOD/ROW; of two files of one name, the first is used.
    """
    modules = [*built_in("files").values(), *(point.value for points in installed("files").values() for point in points)]
    found: dict[str, Path] = {}
    for spec in filter(None, map(importlib.util.find_spec, modules)):
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).glob(pattern)):
                found.setdefault("/".join(path.relative_to(folder).with_suffix("").parts[1:]), path)
    return found


class Registry(MutableMapping[str, Kind]):
    """A mapping from names to registered objects; whether a name is known is determined without importing it.

    Args:
        key: the configuration key that selects an entry, such as "method.name". what: the word for an entry, such as "method".
        entries: those of fedveil, as objects or places "module:attribute".
        own: advice in errors about unknown names for entries of a user, which are decorated with `fedveil.register`.
        kind: one of `_KINDS`, if it differs from `what`.
    """

    def __init__(self, key: str, what: str, entries: Mapping[str, Kind | str], own: str = "", kind: str = "") -> None:
        self.key, self.what, self.own, self.kind = key, what, own, kind or what
        self._entries: dict[str, Kind | str] = {**entries, **built_in(self.kind)}
        self._places = {name: place for name, place in self._entries.items() if isinstance(place, str)}
        self._fedveils = frozenset(self._entries)

    def __getitem__(self, name: str) -> Kind:
        if name not in self._entries:
            return self._imported(name, self._others[name])
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
        return name in self._entries or name in self._others

    def __iter__(self) -> Iterator[str]:
        return iter([*self._entries, *(name for name in self._others if name not in self._entries)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    @cached_property
    def _others(self) -> dict[str, list[EntryPoint]]:
        """Entries of other distributions, read when a name is not one of fedveil."""
        found = installed(self.kind)
        for name in self._fedveils & found.keys():
            claimed = " and ".join(map(owner, found.pop(name)))
            _log.warning("%s = %r is fedveil's own: the %s of that name of %s is not used", self.key, name, self.what, claimed)
        return found

    def _imported(self, name: str, points: list[EntryPoint]) -> Kind:
        if len(points) > 1:
            claimed = " and by ".join(map(owner, points))
            raise ConfigError(f"{self.key} = {name!r} is registered by {claimed}: uninstall one of them")
        point = points[0]
        what = f"{self.key} = {name!r}: {point.value} of {owner(point)}"
        try:
            found = point.load()
        except FedveilError:
            raise
        except Exception as error:
            raise ConfigError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
        PLUGIN_FILES.add(str(sys.modules[point.module].__file__))
        if self.own and name not in self._entries:
            raise ConfigError(f"{what} does not register that {self.what}: decorate it with fedveil.register")
        self._entries.setdefault(name, found)
        return self[name]

    def tried(self) -> Iterator[tuple[str, Kind | ConfigError]]:
        """Yield each name with its entry, or with the error if the distribution that registers it cannot be used."""
        for name in self:
            try:
                yield name, self[name]
            except ConfigError as error:
                yield name, error

    def ready(self, name: str) -> bool:
        """Return whether looking a name up imports no code of another distribution."""
        return name in self._entries

    def distributions(self, name: str) -> list[EntryPoint]:
        """Return the entry points of other distributions that register a name which is not fedveil's own."""
        return [] if name in self._fedveils else self._others.get(name, [])

    def require(self, name: str, key: str = "") -> None:
        """Refuse an unknown name, without importing anything.

        Args:
            key: the key with the name, if it differs from the registry's.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in self:
            raise unknown(key or self.key, name, self.what, self, self.own)

    def find(self, name: str, key: str = "") -> Kind:
        """Return the entry of this name.

        Args:
            key: the key with the name, if it differs from the registry's.

        Raises:
            ConfigError: the name is unknown.
        """
        self.require(name, key)
        return self[name]

    def add(self, name: str, kind: Kind, code: Any) -> None:
        """Register a user-defined entry that the class or function `code` makes; the same module may register it again.

        Raises:
            ConfigError: another entry has the name.
        """
        module, _, title = self._places.get(name, "").partition(":")
        points, package = self.distributions(name), code.__module__.partition(".")[0]
        if name in self._entries and module != code.__module__:
            belongs = f"{title} of {module}" if title else f"a {self.what} of fedveil"
        elif points and package not in {point.module.partition(".")[0] for point in points}:
            belongs = " and ".join(map(owner, points))
        else:
            belongs = ""
        if belongs:
            raise ConfigError(f"the name {name!r} of {code.__qualname__} belongs to {belongs}: choose another")
        self._entries[name], self._places[name] = kind, f"{code.__module__}:{code.__qualname__}"
