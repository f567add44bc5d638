"""The errors a user can meet. Each message says what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class FedveilError(Exception):
    """Base of all errors that fedveil raises for a user to read; the CLI prints one line and exits with 2."""


class ConfigError(FedveilError, ValueError):
    """A configuration or an argument that cannot be accepted.

    Attributes:
        key: of the configuration, such as `privacy.epsilon`; empty where no single key is at fault. value: what was given.
        allowed: the names that would have been accepted, where there is a list of them.
    """

    def __init__(self, message: str, *, key: str = "", value: Any = None, allowed: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.key, self.value, self.allowed = key, value, tuple(allowed)


class DataError(FedveilError):
    """A data set that is missing, unreadable or not what it says it is."""


class UpdateRefused(FedveilError):
    """A client's update that the door does not let out: NaN, infinite, mis-shaped, mis-typed or oversized."""


class BudgetExhausted(FedveilError):
    """A release that would exceed the privacy budget; nothing was released."""


class LedgerError(FedveilError):
    """A ledger that cannot be opened, read or trusted."""


TRAINING = {
    "torch": "PyTorch",
    "safetensors": "safetensors",
    "sklearn": "scikit-learn",
    "matplotlib": "Matplotlib",
    "pooch": "pooch",
}
"""Modules that the extra `train` installs, and the names of their projects."""


def missing_extra(error: BaseException) -> str:
    """Return the line that says which extra to install, if an import failed for the lack of it; else an empty string."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if module not in TRAINING:
        return ""
    return f"this needs {TRAINING[module]}, which is not installed: pip install 'fedveil[train]'"


PLUGIN_FILES: set[str] = set()
"""The files of plugins that were imported."""


def plugin_fault(error: BaseException) -> str:
    """In one line, an error that arose in a plugin's code, with the place; an empty string for any other error."""
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in PLUGIN_FILES]
    if not places:
        return ""
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"the plugin {places[-1].filename}, line {places[-1].lineno}, in {places[-1].name}: {words}"


_HOUSE, _PYTHON = str(Path(__file__).parent), sysconfig.get_path("stdlib")
_INSTALLED = sysconfig.get_path("purelib")


def frames_of(error: BaseException) -> list[tuple[str, int]]:
    """File and line of each call that an error came through, outermost first."""
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]


def users_place(frames: Sequence[tuple[str, int]]) -> str:
    """The innermost call in the user's code or in a library of it, as "file:line"; empty if there is none.

    Args:
        frames: file and line of each call, outermost first. Those before fedveil's last one led here, and do not count.
    """
    found = ""
    for file, line in frames:
        if file.startswith(_HOUSE):
            found = ""
        elif not file.startswith(("<frozen", f"{_INSTALLED}/torch/")) and (
            file.startswith(_INSTALLED) or not file.startswith(_PYTHON)
        ):
            found = f"{file}:{line}"
    return found


def one_line(text: str, longest: int = 2000) -> str:
    """A message as one line of printable characters: others as their escapes, a long one without its middle."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return line if len(line) <= longest else f"{line[: longest // 2]} ... {line[-longest // 2 :]}"


def nearest(word: str, among: Iterable[str]) -> str:
    """The hint " (did you mean 'x'?)" with the closest of the allowed words, or an empty string."""
    close = difflib.get_close_matches(word, list(among), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown(key: str, name: object, what: str, among: Iterable[str], do: str = "") -> ConfigError:
    """The error for a name that nothing has: `key`, of a configuration or of a command, gave it; `do` says what else helps."""
    known = list(among)
    where = f"{key} {name}" if key.startswith("--") else f"{key} = {name!r}"
    there = f"there are {', '.join(known)}{f'; {do}' if do else ''}"
    message = f"{where}: unknown {what}{nearest(str(name), known)}; {there}"
    return ConfigError(message, key=key, value=name, allowed=known)


def refusal(error: ValidationError, model: type[BaseModel], prefix: str = "") -> ConfigError:
    """Return the error for a failed pydantic validation: a line per problem, with the key and the value of the first one."""
    problems = [_problem(detail, model, prefix) for detail in error.errors()]
    first = problems[0]
    return ConfigError("; ".join(map(str, problems)), key=first.key, value=first.value, allowed=first.allowed)


def _problem(detail: Mapping[str, Any], model: type[BaseModel], prefix: str) -> ConfigError:
    path = [str(part) for part in detail["loc"]]
    key = prefix + ".".join(path)
    value, allowed = detail["input"], _fields(model, path[:-1])
    if detail["type"] == "extra_forbidden":
        there = ", ".join(allowed) or "none"
        message = f"{key} = {_shown(value)}: unknown key{nearest(path[-1], allowed)}; allowed here: {there}"
        return ConfigError(message, key=key, value=value, allowed=allowed)
    if detail["type"] == "missing":
        return ConfigError(f"{key}: missing; it must be given", key=key)
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause  # of a section that names its keys itself
    words = str(detail["msg"])
    choices = re.findall("'([^']*)'", words) if detail["type"] == "literal_error" else ()
    return ConfigError(
        f"{key} = {_shown(value)} is not possible: {words[0].lower()}{words[1:]}", key=key, value=value, allowed=choices
    )


def _shown(value: object) -> str:
    try:
        return repr(value)
    except RecursionError:
        return "(nested too deep to be shown)"


def _fields(model: Any, path: list[str]) -> list[str]:
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return list(getattr(model, "model_fields", {}))
