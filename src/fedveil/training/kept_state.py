"""What code of the user's own keeps from one call to the next, compared with what it was before any data.

A module or a task that keeps something of one client's examples carries it past that client's clip and noise, into the next
update or a public score. Reached are the attributes of an object and of all that it holds, and what its own functions name:
closures, defaults, attributes of classes, globals. Installed libraries, files and other processes are not; code that a library
made while the program ran, as torch.fx does, is no library's.
"""

from __future__ import annotations

import collections
import dis
import functools
import marshal
import random
import sys
import sysconfig
import types
import zlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import _has_any_global_hook

from fedveil.errors import ConfigError

_OPAQUE = frozenset(("torch", "numpy", "pydantic", "pydantic_core", "fedveil", "logging", "threading", "builtins"))
"""Packages of whose objects only the identity is compared."""
_FOLLOWED = (torch.nn.Module, torch.distributions.Distribution, torch.quasirandom.SobolEngine)
"""Kinds among these whose attributes are compared nevertheless, as are those of all objects with a `state_dict`."""
_DRAWN = "random numbers"
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


class KeptState:
    """What an object and its code reach, as it was when this was made, or when `remember` was called last.

    Args:
        title: what errors call it. root: the object, such as a module. changing: tensors that may change.
    """

    def __init__(self, title: str, root: object, changing: tuple[torch.Tensor, ...] = ()) -> None:
        self._title, self._root, self._changing = title, root, changing
        self.remember()

    def __reduce__(self) -> tuple[type[KeptState], tuple[Any, ...]]:
        return KeptState, (self._title, self._root, self._changing)

    def remember(self) -> None:
        """Compare with what is reached now from here on."""
        self._loaded = frozenset(sys.modules)  # a module that a function imports later on is not followed: it would be new
        self._before = self._reached()

    def require_unchanged(self) -> None:
        """Refuse what code kept.

        Raises:
            ConfigError: something differs; each time until `remember`.
        """
        now = self._reached()
        if now == self._before:
            return
        differ = [path for path in (*now, *self._before) if now.get(path) != self._before.get(path)]
        names = ", ".join(dict.fromkeys(differ[:3]))
        drawn = any(type(value) is tuple and value[:1] == (_DRAWN,) for value in now.get(differ[0], []))
        hint = "use local variables, or make it once, before the first call"
        raise ConfigError(
            f"{self._title} keeps {names} from one call to the next, which would carry one client's data to the next client or "
            f"into a score: {'draw from the global generator of torch, which is seeded for each client' if drawn else hint}"
        )

    def _reached(self) -> dict[str, list[Hashable]]:
        """What stands for the value at each path; several functions may have one name."""
        found: dict[str, list[Hashable]] = {}
        for path, value in _Walk({id(t) for t in self._changing}, self._loaded).values("", self._root):
            found.setdefault(path, []).append(value)
        return found


def has_own_code(module: torch.nn.Module) -> bool:
    """Whether a part is of a class that is neither torch's nor ours, or has a hook or a `forward` of its own.

    Functions that parts call may be the user's all the same: a network that is not built in is compared whatever this says.
    """
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    return any(not _opaque(type(part)) or _own_entries(part) for part in module.modules())


def _own_entries(part: torch.nn.Module) -> bool:
    """Whether somebody hung a hook on a layer or its parameters, or replaced a function of it."""
    hung = any(value and name.endswith("_hooks") for name, value in vars(part).items())
    replaced = any(callable(value) and hasattr(type(part), name) for name, value in vars(part).items())
    return hung or replaced or any(getattr(p, name) for p in part.parameters(recurse=False) for name in TENSOR_HOOKS)


class _Same:
    """Equal to what holds the same object; the object is held, so that no other one gets its address."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Walk:
    """One walk over what is reached: pairs of a path and what stands for the value there."""

    def __init__(self, changing: set[int], loaded: frozenset[str]) -> None:
        self._changing, self._loaded = changing, loaded
        self._seen: dict[int, object] = {}  # held, so that addresses stay theirs
        self._classes: set[type] = set()

    def values(self, path: str, value: Any) -> Iterator[tuple[str, Hashable]]:
        if isinstance(value, torch.Tensor):
            yield path, _Same(value) if id(value) in self._changing else _content(value)
            hooks = [(name, found) for name in TENSOR_HOOKS if (found := getattr(value, name))]
            if (vars(value) or hooks) and id(value) not in self._seen:
                self._seen[id(value)] = value
                yield from self._hung(path, value)
                for name, found in hooks:
                    yield from self.values(_join(path, name), found)
            return
        if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
            yield path, (value.dtype.str, value.shape, zlib.crc32(value.tobytes()))
            return
        if isinstance(value, types.ModuleType):
            yield path, _Same(value)
            return
        if not isinstance(value, np.ndarray):  # of which marshal would take the addresses of objects
            try:
                yield path, (type(value).__name__, zlib.crc32(marshal.dumps(value, 2)))
                return
            except ValueError:
                pass
        if id(value) in self._seen:
            yield path, _Same(value)
            return
        self._seen[id(value)] = value
        yield from self._parts(path, value)

    def _parts(self, path: str, value: Any) -> Iterator[tuple[str, Hashable]]:
        match value:
            case Mapping():
                yield path, (type(value).__name__, len(value))
                for key, part in value.items():
                    yield from self.values(f"{path}[{_short(key)}]", part)
                yield from self._hung(path, value)
                yield from self._class(type(value))
            case list() | tuple() | set() | frozenset() | collections.deque():
                yield path, (type(value).__name__, len(value))
                for i, part in enumerate(value):
                    yield from self.values(f"{path}[{i}]", part)
                yield from self._hung(path, value)
                yield from self._class(type(value))
            case np.ndarray():  # of objects
                yield path, value.shape
                yield from self.values(path, value.reshape(-1).tolist())
            case types.FunctionType():
                yield path, _Same(value)
                yield from self._function(value)
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                yield path, value.__name__
                yield from self.values(path, value.__self__)
            case types.MethodType():
                yield path, _Same(value.__func__)
                yield from self.values(path, value.__self__)
                yield from self.values(path, value.__func__)
            case functools.partial():
                yield from self.values(path, [value.func, value.args, value.keywords])
            case type():
                yield path, _Same(value)
                yield from self._class(value)
            case torch.Generator():
                yield path, (_DRAWN, _content(value.get_state()))
            case random.SystemRandom():  # which has no state
                yield path, _Same(value)
            case random.Random():
                yield path, (_DRAWN, value.getstate())
            case np.random.Generator():
                yield path, (_DRAWN, repr(value.bit_generator.state))
            case np.random.BitGenerator():
                yield path, (_DRAWN, repr(value.state))
            case np.random.RandomState():
                yield path, (_DRAWN, repr(value.get_state(legacy=False)))
            case _:
                yield from self._object(path, value)

    def _object(self, path: str, value: Any) -> Iterator[tuple[str, Hashable]]:
        yield path, _Same(value)
        if isinstance(value, _FOLLOWED) or hasattr(value, "state_dict") or not _opaque(type(value)):
            for name, part in (*_attributes(value), *_slots(value)):
                yield from self.values(_join(path, name), part)
            yield from self._class(type(value))

    def _hung(self, path: str, value: Any) -> Iterator[tuple[str, Hashable]]:
        """Attributes of a tensor, or of a container of a class of its own."""
        for name, part in list(getattr(value, "__dict__", {}).items()):
            yield from self.values(_join(path, name), part)

    def _class(self, kind: type) -> Iterator[tuple[str, Hashable]]:
        """Attributes of a class that is the user's own, and what its functions reach; of another one, functions that are no
        library's, which torch.fx makes."""
        for one in kind.__mro__:
            if one in self._classes or one.__module__ == "builtins":
                continue
            self._classes.add(one)
            own = _own(one.__module__)
            for name, part in list(vars(one).items()):
                part = getattr(part, "__func__", getattr(part, "fget", getattr(part, "func", part)))  # what a descriptor calls
                function = isinstance(part, types.FunctionType)
                if (own and (function or not name.startswith(("__", "_abc_")))) or (function and _own(part.__module__)):
                    yield from self.values(f"{one.__qualname__}.{name}", part)

    def _function(self, function: types.FunctionType) -> Iterator[tuple[str, Hashable]]:
        """What a function keeps, and what it finds by name."""
        if not _own(function.__module__):
            return
        title, code = function.__qualname__, function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield from self.values(f"{name} of {title}", cell.cell_contents)
            except ValueError:  # not bound yet
                yield f"{name} of {title}", None
        yield from self.values(f"defaults of {title}", [function.__defaults__, function.__kwdefaults__, vars(function)])
        if not _own(function.__globals__.get("__name__")):  # what wraps it, such as torch.no_grad
            return
        names, imported, attributes = _names(code)
        for name in names & function.__globals__.keys():
            yield from self._global(f"global {name}", function.__globals__[name], attributes)
        package = function.__globals__.get("__package__")
        for name in self._loaded & {*imported, *(f"{package}.{one}" for one in imported)}:
            if _own(name) and name in sys.modules:
                yield from self._global(f"global {name}", sys.modules[name], attributes)

    def _global(self, path: str, value: Any, attributes: frozenset[str]) -> Iterator[tuple[str, Hashable]]:
        """A global; of a module of the user's own, what code names of it and of the modules inside it."""
        if not isinstance(value, types.ModuleType) or not _own(value.__name__):
            yield from self.values(path, value)
            return
        for name in attributes & vars(value).keys():
            inner = vars(value)[name]
            if isinstance(inner, types.ModuleType) and inner.__name__.startswith(f"{value.__name__}."):
                yield from self._global(f"{path}.{name}", inner, attributes)
            else:
                yield from self.values(f"{path}.{name}", inner)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object; of a module's own tables, what they hold stands under its name alone."""
    for name, part in list(getattr(value, "__dict__", {}).items()):
        if isinstance(value, torch.nn.Module) and name in ("_parameters", "_buffers", "_modules"):
            yield from list(part.items())
        elif not (isinstance(value, torch.nn.RNNBase) and name.startswith("_flat_weight")):  # made anew of its parameters
            yield name, part


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                yield name, getattr(value, name)


@functools.cache
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Of code and the functions inside it: the globals that it uses, the modules that it imports, all names (attributes too)."""
    found, imported = set[str](), set[str]()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"):
            found.add(one.argval)
        elif one.opname == "IMPORT_NAME":
            imported.add(one.argval)
    within = [_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)]
    everything = zip((found, imported, code.co_names), *within, strict=True)
    used, modules, names = (frozenset[str]().union(*parts) for parts in everything)
    return used, modules, names


def _content(tensor: torch.Tensor) -> Hashable:
    """What stands for a tensor's values; writes that torch does not count, such as into `.data`, show as well."""
    kind = type(tensor), tensor.dtype, tuple(tensor.shape), tensor.requires_grad
    try:
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except Exception:  # outlived its transformation, or not dense: known by its address alone
        return *kind, _Same(tensor), tensor._version
    return *kind, zlib.crc32(values.data)


def _opaque(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OPAQUE


@functools.cache
def _own(module: str | None) -> bool:
    """Whether a module of that name is neither part of Python nor installed beside it; code of no module was generated."""
    if module is None:
        return True
    if module.partition(".")[0] in _OPAQUE | sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not file.startswith(_INSTALLED)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _short(key: object) -> str:
    return repr(key) if isinstance(key, str | int | float | tuple) else type(key).__name__
