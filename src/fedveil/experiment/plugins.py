"""User-defined methods, data sets and input features: Python modules that a configuration names.

A plugin registers what it brings when it is imported. It is imported when a method or a data set is looked up, not when a
configuration is read: reading a run directory runs no code.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from fedveil.data.catalogue import Info
from fedveil.data.features import FEATURES, FeatureMap
from fedveil.errors import PLUGIN_FILES, ConfigError, FedveilError, nearest
from fedveil.methods import method_registry
from fedveil.methods.base import MethodConfig
from fedveil.models.model_registry import register_model
from fedveil.tasks.task import Task
from fedveil.tasks.task_registry import register_task

if TYPE_CHECKING:
    from fedveil.experiment.sections import DataSection, PublicSection


def _register_data(info: Info) -> Callable[[Any], Any]:
    from fedveil.data.load import register

    return register(info)


_REGISTRARS: dict[type, Callable[[Any], Any]] = {
    MethodConfig: method_registry.register,
    Task: register_task,
    Info: _register_data,
    str: register_model,
}
"""The function that registers subclasses or instances of each type."""


def register(thing: Any) -> Any:
    """Register a user-defined method or task: a decorator of its class, whose `name` a configuration then gives.

    `register("my-net")` decorates a function that makes a model, `register(Info(...))` a function that reads a data set.

    Raises:
        ConfigError: nothing that can be registered; a part is missing; another has the name.
    """
    for base in thing.__mro__ if isinstance(thing, type) else type(thing).__mro__:
        if base in _REGISTRARS:
            return _REGISTRARS[base](thing)
    kinds = ", ".join(kind.__name__ for kind in _REGISTRARS)
    raise ConfigError(f"{thing!r} cannot be registered: derive it from, or give, one of {kinds}")


def load_plugins(plugins: Sequence[str], key: str = "run.plugins") -> None:
    """Import the modules; one that is imported already is not imported again.

    Args:
        plugins: paths of files `x.py`, whose folders are appended to the module search path; or names of importable modules.
        key: of the configuration that names them.

    Raises:
        ConfigError: no such module, a name that another module has, or an error while it was imported.
    """
    for plugin in plugins:
        name = _findable(Path(plugin), key) if plugin.endswith(".py") else plugin
        try:
            if plugin.endswith(".py") and name not in sys.modules:
                _import_file(name, plugin)
            else:
                importlib.import_module(name)
            if file := getattr(sys.modules.get(name), "__file__", None):
                PLUGIN_FILES.add(file)
        except (FedveilError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit, too: a run that never began is no success
            raise ConfigError(f"{key}: {plugin} cannot be imported: {_described(error)}") from error


def module_of(plugin: str) -> str:
    """Return the name of the module that a plugin becomes."""
    return Path(plugin).stem if plugin.endswith(".py") else plugin


def importable(plugin: str) -> str:
    """Return a plugin's file, or the longest importable prefix of its module's name, or ""; nothing is imported."""
    if plugin.endswith(".py"):
        return plugin if Path(plugin).is_file() else ""
    parts = plugin.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if _origin(name) is not None), "")


def digests(plugins: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each plugin's own file, by the module's name; nothing is imported.

    Raises:
        ConfigError: a plugin's file is not there.
    """
    return {module_of(plugin): hashlib.sha256(_file_of(plugin).read_bytes()).hexdigest() for plugin in plugins}


def _file_of(plugin: str) -> Path:
    """Return the file of a plugin, which is a path or the name of a module; the module's packages are not imported."""
    file = Path(plugin)
    if not plugin.endswith(".py"):
        file = Path(str(_origin(plugin)))
    if not file.is_file():
        raise ConfigError(f"run.plugins: found no file for {plugin!r}; paths are relative to the configuration that names them")
    return file


def _origin(module: str) -> str | None:
    first, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(first) if first else None
    except ValueError:  # a module of the interpreter itself
        return None
    name = first
    for part in below:
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations or []) if spec is not None else None
    return None if spec is None else spec.origin


class _FromSource(SourceFileLoader):
    """Compiles the file itself: a cached .pyc beside it may hold other code than the file whose digest is known."""

    def get_code(self, fullname: str) -> CodeType | None:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import_file(name: str, file: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file, loader=_FromSource(name, file))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _findable(path: Path, key: str) -> str:
    """Return the module name under which Python finds this file; refuse a file that it does not find."""
    name = path.stem
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}; paths are relative to the configuration that names them")
    if not name.isidentifier():
        raise ConfigError(f"{key}: {path}: {name!r} cannot be a module's name; rename the file to letters, digits and _")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    known = sys.modules.get(name)
    spec = getattr(known, "__spec__", None) if known is not None else importlib.util.find_spec(name)
    origin = getattr(known, "__file__", None) if known is not None else getattr(spec, "origin", None)
    if origin is None or not Path(origin).exists() or not Path(origin).samefile(path):
        raise ConfigError(f"{key}: {path}: there is another module {name!r} ({origin or 'built in'}); rename the file")
    return name


def _described(error: BaseException) -> str:
    """Describe the error in one line, with its location."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError | ModuleNotFoundError) else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{place}"


def feature_map(data: DataSection, public: PublicSection) -> FeatureMap | None:
    """Return the function that makes the features, or None without features; a user-defined function is imported.

    Raises:
        ConfigError: unknown name, or an import path at which there is no function.
    """
    if data.features is None:
        if public.data:
            raise ConfigError("public.data whitens features, and there are none: set data.features, such as 'oriented-gradients'")
        return None
    make = _own(data.features, data.code) if data.code else FEATURES.get(data.features)
    if make is None:
        raise ConfigError(
            f"data.features = {data.features!r}: unknown features{nearest(data.features, FEATURES)}; there are "
            f"{', '.join(FEATURES)}; a function of your own needs an import path such as 'features.py:edges'"
        )
    return FeatureMap(data.features, make, public.data, public.components, data.data_dir, data.download)


def _own(path: str, code: tuple[str, ...]) -> Any:
    load_plugins(code, key="data.features")
    module, attribute = sys.modules[module_of(code[0])], path.rpartition(":")[2]
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"data.features = {path!r}: {code[0]} has no function {attribute!r}{nearest(attribute, vars(module))}")
    return found
