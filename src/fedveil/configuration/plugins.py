"""Methods and data sets of one's own: Python modules that a configuration names in `run.plugins`.

A plugin registers what it brings when it is imported. It is imported when a method or a data set is looked up, not when a
configuration is read: reading a run directory runs no code.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from fedveil.errors import ConfigError, FedveilError


def load_plugins(plugins: Sequence[str]) -> None:
    """Import the modules; one that is imported already is not imported again.

    Args:
        plugins: paths of files `x.py`, whose folders are appended to the module search path; or names of importable modules.

    Raises:
        ConfigError: no such module, a name that another module has, or an error while it was imported.
    """
    for plugin in plugins:
        name = _findable(Path(plugin)) if plugin.endswith(".py") else plugin
        try:
            importlib.import_module(name)
        except FedveilError:
            raise
        except Exception as error:
            raise ConfigError(f"run.plugins: {plugin} cannot be imported: {_described(error)}") from error


def digests(plugins: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each plugin's own file, by the module's name; the plugins must be importable."""
    found = {}
    for plugin in plugins:
        spec = None if plugin.endswith(".py") else importlib.util.find_spec(plugin)
        file = plugin if spec is None else spec.origin
        found[Path(plugin).stem if spec is None else plugin] = hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()
    return found


def _findable(path: Path) -> str:
    """The module name under which Python finds this very file."""
    name = path.stem
    if not path.is_file():
        raise ConfigError(f"run.plugins: there is no file {path}; paths are relative to the configuration that names them")
    if not name.isidentifier():
        raise ConfigError(f"run.plugins: {path}: {name!r} cannot be a module's name; rename the file to letters, digits and _")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    known = sys.modules.get(name)
    spec = getattr(known, "__spec__", None) if known is not None else importlib.util.find_spec(name)
    origin = getattr(known, "__file__", None) if known is not None else getattr(spec, "origin", None)
    if origin is None or not Path(origin).exists() or not Path(origin).samefile(path):
        raise ConfigError(f"run.plugins: {path}: there is another module {name!r} ({origin or 'built in'}); rename the file")
    return name


def _described(error: Exception) -> str:
    """The error in one line, with the place where it happened."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError | ModuleNotFoundError) else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{place}"
