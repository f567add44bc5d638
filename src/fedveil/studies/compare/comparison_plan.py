"""What a comparison runs: each method at each guarantee with each seed, checked and calibrated before anything is trained."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedveil.configuration.config import Config, method_of, override, parse
from fedveil.data.partition import checked_options
from fedveil.data.partition_options import PARTITIONS
from fedveil.errors import ConfigError, FedveilError, nearest
from fedveil.methods.method_registry import METHODS
from fedveil.statement.certify import certify_config
from fedveil.statement.statement import Statement
from fedveil.studies.compare.claim_targets import at_claim
from fedveil.studies.compare.comparability import Check
from fedveil.studies.grid.run_grid import Cell

By = Literal["proven", "claimed"]
PROMISE = ("privacy.view", "privacy.unit", "privacy.adjacency", "privacy.delta")
"""What an epsilon speaks of; proven ones are equal only where these are."""
SLACK = 1e-4
"""A proven epsilon may be this much above its target, relatively: noise is calibrated to rounding."""


@dataclass(frozen=True)
class Planned:
    """One row of the comparison, before it is run.

    Args:
        method: as it was asked for, options included. partition: likewise, or empty where there is one only.
        epsilon: the guarantee it is compared at; inf for a run without noise. cells: one a seed, none if it cannot be run.
        reason: why it cannot. statement: what it will promise.
    """

    method: str
    partition: str
    epsilon: float
    cells: tuple[Cell, ...]
    reason: str = ""
    statement: Statement | None = None


def plan(
    config: Config,
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: Sequence[int],
    partitions: Sequence[str] = (),
    by: By = "proven",
    on_step: Callable[[str], None] | None = None,
    metric: str = "test_accuracy",
) -> list[Planned]:
    """The rows of the comparison, those that cannot be run with their reason; the data of every seed are dealt out for that.

    A method that has no noise to calibrate is run once without any, as the reference.

    Args:
        methods: `name` or `name:key=value:key=value`; a key with a dot is one of another section.
        partitions: `kind`, `kind:value` or `kind:key=value`, with the clients of the configuration.
        on_step: told what is being checked. metric: the number that every run must give.

    Raises:
        ConfigError: an unknown method, key, partition or value, or one given twice.
    """
    method_of(config)  # its plugins may bring others of the methods
    _distinct("--methods", methods)
    _distinct("--epsilon", [f"{e:g}" for e in epsilons])
    _distinct("--seeds", [str(s) for s in seeds])
    if bad := [e for e in epsilons if not e > 0]:
        raise ConfigError(f"--epsilon {bad[0]:g}: an epsilon is a number above 0, or inf for no noise")
    if by == "claimed" and math.inf in epsilons:
        raise ConfigError("--epsilon inf is a run without noise, of which nothing is claimed: leave it out, or use --by proven")
    rows: list[Planned] = []
    check = Check(metric)
    for partition, base in _dealt(config, partitions):
        for method in methods:
            mine = configured(base, method, by)
            if on_step is not None:
                on_step(f"{method} {partition}".strip())
            rows += (_checked(row, check) for row in _rows(mine, method, partition, epsilons, seeds, by))
    return rows


# --- one row ------------------------------------------------------------------------------------------------------------


def _rows(config: Config, method: str, partition: str, epsilons: Sequence[float], seeds: Sequence[int], by: By) -> list[Planned]:
    """The rows of a method, one a guarantee; of one that has no noise at all, the reference."""
    reference = _without_noise(_privacy(config), method, partition, seeds)
    if reference.cells:
        return [reference]
    free = _privacy(config, noise_multiplier=0.0)
    return [
        _row(config, method, partition, e, seeds, by) if e < math.inf else _without_noise(free, method, partition, seeds)
        for e in sorted(epsilons)
    ]


def _checked(row: Planned, check: Check) -> Planned:
    """The row, without its cells where they could not give the number."""
    problem = check.problem([cell.config for cell in row.cells]) if row.cells else ""
    return replace(row, cells=(), reason=problem) if problem else row


def _row(config: Config, method: str, partition: str, epsilon: float, seeds: Sequence[int], by: By) -> Planned:
    try:
        given = _privacy(config, epsilon=epsilon) if by == "proven" else at_claim(config, epsilon)
        statement = certify_config(given)
        _same_guarantee(statement, epsilon, by)
    except FedveilError as problem:
        return Planned(method, partition, epsilon, (), str(problem))
    name = f"{'claimed-' if by == 'claimed' else ''}eps-{epsilon:g}"
    return Planned(method, partition, epsilon, _cells(given, method, partition, epsilon, name, seeds), "", statement)


def _same_guarantee(statement: Statement, epsilon: float, by: By) -> None:
    """Refuse what does not keep the promise that the rows are compared at."""
    proven = statement.proven
    if by == "proven" and not proven.epsilon <= epsilon * (1 + SLACK):
        raise ConfigError(
            f"proven is {'no bound' if math.isinf(proven.epsilon) else f'epsilon = {proven.epsilon:g}'}"
            f"{f' ({proven.reason})' if proven.reason else ''}: not comparable at a proven epsilon of {epsilon:g}"
        )


def _without_noise(given: Config, method: str, partition: str, seeds: Sequence[int]) -> Planned:
    """The row of a configuration that is to be without noise."""
    try:
        statement = certify_config(given)
    except FedveilError as problem:
        return Planned(method, partition, math.inf, (), str(problem))
    if statement.proven.epsilon < math.inf:
        return Planned(method, partition, math.inf, (), "there is noise in it all the same")
    return Planned(method, partition, math.inf, _cells(given, method, partition, math.inf, "no-noise", seeds), "", statement)


def _cells(config: Config, method: str, partition: str, epsilon: float, name: str, seeds: Sequence[int]) -> tuple[Cell, ...]:
    labels: dict[str, str | float] = {"method": method, "partition": partition, "epsilon": epsilon}
    folder = "/".join(filter(None, (_slug(method), _slug(partition), name)))
    return tuple(
        Cell(
            f"{folder}/seed-{seed}",
            config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})}),
            {**labels, "seed": seed},
        )
        for seed in seeds
    )


def _privacy(config: Config, **promise: float) -> Config:
    """The configuration with this promise and no other."""
    section = config.privacy.model_copy(update={"epsilon": None, "noise_multiplier": None, **promise})
    return config.model_copy(update={"privacy": section})


# --- what was asked for -------------------------------------------------------------------------------------------------


def configured(config: Config, method: str, by: By = "proven") -> Config:
    """The configuration with another method: `name:key=value:...`; the configuration's own method keeps its options.

    Raises:
        ConfigError: an unknown method, or an option that cannot be.
    """
    name, *options = method.split(":")
    if name not in METHODS:
        raise ConfigError(f"--methods {method}: unknown method{nearest(name, METHODS)}; there are {', '.join(METHODS)}")
    raw = config.model_dump(mode="json")
    own = raw["method"] if raw["method"].get("name") == name else {}
    fields = METHODS[name].model_fields
    raw["method"] = {**own, "name": name}
    if "variant" in fields:
        raw["method"]["variant"] = "published" if by == "claimed" else "proven"
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key in ("name", "run.seed", "privacy.epsilon", "privacy.noise_multiplier", "data.partition"):
            raise ConfigError(
                f"--methods {method}: {option!r} is not possible; give options as name:key=value:key=value, a key with a dot "
                "for another section (training.optimizer.lr=0.1); epsilon, seeds and partitions have options of their own"
            )
        if by == "proven" and key in PROMISE:
            raise ConfigError(
                f"--methods {method}: {key} is part of the guarantee, which is the same for all methods: "
                f"set it in the configuration (--set {option}); with --by claimed the methods may differ in it"
            )
        override(raw, f"{key if '.' in key else f'method.{key}'}={value}")
    return parse(raw)


def _dealt(config: Config, partitions: Sequence[str]) -> list[tuple[str, Config]]:
    """The configuration with each partition, under its name."""
    _distinct("--partition", partitions)
    if not partitions:
        return [("", config)]
    return [
        (text, config.model_copy(update={"data": config.data.model_copy(update={"partition": partition_of(text, config)})}))
        for text in partitions
    ]


def partition_of(text: str, config: Config) -> dict[str, Any]:
    """The partition that `kind:value` or `kind:key=value:...` describes, among the configuration's clients unless told otherwise.

    Raises:
        ConfigError: an unknown kind or key, an impossible value.
    """
    kind, *parts = text.split(":")
    raw: dict[str, Any] = {"partition": {"kind": kind}}
    if (clients := config.data.partition.get("clients")) is not None:
        raw["partition"]["clients"] = clients
    for part in parts:
        key, equals, value = part.partition("=")
        override(raw, f"partition.{key}={value}" if equals else f"partition.{_main_option(kind)}={key}")
    checked_options(raw["partition"])
    return dict(raw["partition"])


def _main_option(kind: str) -> str:
    """The option that a bare value stands for: the first that the kind has of its own."""
    fields = PARTITIONS[kind].model_fields if kind in PARTITIONS else {}
    own = [key for key in fields if key not in ("kind", "clients")]
    return own[0] if own else "clients"


def split_list(text: str) -> list[str]:
    """What stands between commas; commas in brackets or braces do not count."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in ")}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _distinct(option: str, given: Sequence[str]) -> None:
    if len(set(given)) < len(given):
        raise ConfigError(f"{option} names {next(g for g in given if list(given).count(g) > 1)} twice: give each once")


def _slug(text: str) -> str:
    """Text as a directory's name."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", text).strip("-")
