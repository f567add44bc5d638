"""Checks that every method must pass, as scikit-learn's `check_estimator` for estimators."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.attacks.replay import replay
from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure, replace
from fedveil.experiment.run import run
from fedveil.methods.base import MethodConfig

if TYPE_CHECKING:
    from fedveil.experiment.result import Result

ROUNDS = 3
_ROUGHLY = 1e-4
"""Largest difference between the engine that trains clients together and the others, relative to the largest coordinate."""


def check_method(method: MethodConfig | type[MethodConfig], **sections: Mapping[str, Any]) -> None:
    """Check a registered method on six clients with scikit-learn's digits, in each view that it accepts.

    The method must have a statement. In a replay, neighbouring data may change nothing public but the released numbers, and each
    contribution must stay within its clip and sensitivity; neighbours include huge, tiny and failing examples. The engines must
    agree, and an interrupted run must continue to the same bits.

    Args:
        method: a method, or its class. sections: sections of the configuration, if the method needs other values.

    Raises:
        AssertionError: what fails, one line each.
    """
    chosen: MethodConfig = method() if isinstance(method, type) else method  # type: ignore[call-arg]
    views, problems = [], list[str]()
    for view in ("server", "aggregate", "final"):
        config = _configuration(chosen, view, sections)
        try:
            certify_config(config)
        except ConfigError as refusal:
            problems.append(f"{view} view: refused: {refusal}")
            continue
        views.append(view)
    if not views:
        raise AssertionError(f"{chosen.name} accepts no view:\n" + "\n".join(problems))
    found = [f"{view} view: {problem}" for view in views for problem in _problems(_configuration(chosen, view, sections))]
    if found:
        raise AssertionError(f"{chosen.name} fails:\n" + "\n".join(found))


def _configuration(method: MethodConfig, view: str, sections: Mapping[str, Mapping[str, Any]]) -> Config:
    usual: dict[str, Any] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}},
        "model": {"name": "linear"},
        "training": {"rounds": ROUNDS, "clients_per_round": 4, "sampling": "fixed", "local_steps": 2, "batch_size": 16},
        "privacy": {"epsilon": 8.0, "delta": 1e-3, "view": view},
        "run": {"seed": 1, "seeded_noise": True, "engine": "inline"},
    }
    for name, keys in sections.items():
        usual[name] = {**usual.get(name, {}), **keys}
    return configure(method=method, **usual)


def _problems(config: Config) -> Iterator[str]:
    checks: list[tuple[str, Callable[[Config, Path], Iterator[str]]]] = [
        ("replay", _replayed),
        ("engines", _engines),
        ("resume", _resumed),
    ]
    for name, check in checks:
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield from (f"{name}: {problem}" for problem in check(config, Path(folder)))
            except FedveilError as problem:
                yield f"{name}: {problem}"


def _replayed(config: Config, folder: Path) -> Iterator[str]:
    if not np.isfinite(certify_config(config).proven.epsilon):
        return
    for check in replay(config, rounds=ROUNDS).checks:
        if check.finding:
            yield f"{check.check}: {check.finding}"


def _engines(config: Config, folder: Path) -> Iterator[str]:
    inline = _vector(run(config, folder / "inline"))
    for engine in ("pool", "batched"):
        other = _vector(run(replace(config, {"run.engine": engine}), folder / engine))
        distance, allowed = float(np.abs(other - inline).max()), _ROUGHLY * float(np.abs(inline).max())
        if distance > (0.0 if engine == "pool" else allowed):
            yield f"{engine} ends {distance:.3g} away from inline"


def _resumed(config: Config, folder: Path) -> Iterator[str]:
    def interrupt(row: dict[str, Any]) -> None:
        if row["round"] == 0:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        run(config, folder / "interrupted", interrupt)
    whole, resumed = run(config, folder / "whole"), run(config, folder / "interrupted", resume=True)
    if not np.array_equal(_vector(whole), _vector(resumed)):
        yield "an interrupted run that is resumed ends elsewhere than one that is not"


def _vector(result: Result) -> Any:
    return result.model.vector.numpy().copy()
