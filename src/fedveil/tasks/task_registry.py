"""The tasks by name. Adding one is one file and one line here; a project's own are registered by its plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from fedveil.errors import ConfigError, refusal
from fedveil.registry import Registry
from fedveil.tasks.task import Column, Task

Kind = TypeVar("Kind", bound=Task)

TASKS: Registry[type[Task]] = Registry(
    "task.name",
    "task",
    {
        "classification": "fedveil.tasks.classification:Classification",
        "binary": "fedveil.tasks.classification:Binary",
        "multi-label": "fedveil.tasks.classification:MultiLabel",
        "regression": "fedveil.tasks.regression:Regression",
        "segmentation": "fedveil.tasks.segmentation:Segmentation",
        "token-prediction": "fedveil.tasks.token_prediction:TokenPrediction",
        "survival": "fedveil.tasks.survival:Survival",
    },
    "a task of your own needs its file in run.plugins",
)


def register_task(kind: type[Kind]) -> type[Kind]:
    """Make a task of one's own known by its name: a decorator of its class.

    Raises:
        ConfigError: it has no name or no loss, or another task has the name.
    """
    name = kind.model_fields["name"].default
    if "metrics" in kind.model_fields:
        raise ConfigError(f"{kind.__qualname__} is not a task yet: `metrics` is no constant: leave its annotation out")
    lacking = [column for column in kind.metrics if not isinstance(column, Column)]
    if lacking or (kind.metrics and kind.scores is Task.scores):
        raise ConfigError(
            f"{kind.__qualname__} is not a task yet: its metrics have to be of fedveil.Column, and `scores` has to return them"
        )
    if not isinstance(name, str) or (kind.losses is Task.losses and kind.loss is Task.loss):
        lacks = "`losses`" if isinstance(name, str) else 'name: str = "..."'
        raise ConfigError(f"{kind.__qualname__} is not a task yet: it lacks {lacks} (see fedveil.tasks.task.Task)")
    TASKS.add(name, kind, kind)
    return kind


def task_from(options: Mapping[str, Any]) -> Task:
    """The task that `options` describe: `name`, and the constants of that task.

    Raises:
        ConfigError: unknown name or constant, impossible value.
    """
    kind = TASKS.find(str(options.get("name")))
    try:
        return kind(**options)
    except ValidationError as error:
        raise refusal(error, kind, "task.") from None


def built_in_task(options: Mapping[str, Any] | None) -> Task | None:
    """Return the built-in task that `options` describe, or None for a user's task and for options that it does not have."""
    kind = TASKS.get(str((options or {"name": "classification"}).get("name")))
    if kind is None or not kind.__module__.startswith("fedveil."):
        return None
    try:
        return task_from(options or {"name": "classification"})
    except ConfigError:
        return None
