"""What the shell completes: each list is read, without torch, when the user asks for it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, get_args


def method_names(incomplete: str) -> list[str]:
    """Names of methods."""
    from fedveil.methods.method_registry import METHODS

    return _beginning(incomplete, METHODS)


def preset_names(incomplete: str) -> list[str]:
    """Names of presets."""
    from fedveil.configuration.presets import names

    return _beginning(incomplete, names())


def data_set_names(incomplete: str) -> list[str]:
    """Names of data sets."""
    from fedveil.data.catalogue import CATALOGUE

    return _beginning(incomplete, CATALOGUE)


def method_lists(incomplete: str) -> list[str]:
    """Names of methods separated by commas, of which the last is completed."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in method_names(last)]


def override_items(incomplete: str) -> list[str]:
    """`section.key=`; where it can be one key only whose values have names, `section.key=value`."""
    from fedveil.configuration.config import Config, flat

    keys = [f"{key}=" for key in flat(Config().resolved()) if not key.startswith("method.") or key == "method.name"]
    found = [key for key in keys if key.startswith(incomplete) or incomplete.startswith(key)]
    return _beginning(incomplete, [found[0] + value for value in _values(found[0][:-1])] or found) if len(found) == 1 else found


def _values(key: str) -> list[str]:
    """What a key of the configuration may be, where that has names."""
    from fedveil.configuration.config import Config
    from fedveil.data.catalogue import CATALOGUE
    from fedveil.data.partition_options import PARTITIONS
    from fedveil.methods.method_registry import METHODS
    from fedveil.models.model_registry import MODELS
    from fedveil.tasks.task_registry import TASKS

    named: dict[str, Iterable[str]] = {"data.name": CATALOGUE, "data.partition.kind": PARTITIONS, "model.name": MODELS}
    named |= {"method.name": METHODS, "task.name": TASKS}
    if key in named:
        return list(named[key])
    kind: Any = Config
    for part in key.split("."):
        kind = kind.model_fields[part].annotation
    if kind is bool:
        return ["true", "false"]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(one.value) for one in kind]
    inside = (word for one in get_args(kind) for word in (get_args(one) or (one,)))  # of an optional one, too
    return [word for word in inside if isinstance(word, str)]


@contextlib.contextmanager
def whole_words() -> Iterator[None]:
    """Completion in bash, which breaks words at `=` and `:`, is asked for whole words; what it has of them is not repeated."""
    if os.environ.get("_FEDVEIL_COMPLETE") != "complete_bash":
        yield
        return
    words: list[str] = []
    for word in os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]:
        if words and (word[:1] in ("=", ":") or words[-1][-1:] in ("=", ":")):
            words[-1] += word
        else:
            words.append(word)
    os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    has = words[-1][: max(words[-1].rfind("="), words[-1].rfind(":")) + 1]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print("\n".join(line.removeprefix(has) for line in printed.getvalue().splitlines()))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
