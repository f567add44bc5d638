"""Recomputation of a run's statement from its configuration and data card, compared number by number."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedveil import __version__
from fedveil.data.catalogue import Info, Targets
from fedveil.data.partition import checked_options
from fedveil.data.partition_options import Users
from fedveil.errors import FedveilError
from fedveil.experiment.certify import certified
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import load_config
from fedveil.experiment.public_setting import Population, population_of, sized_by_labels
from fedveil.federation.history import built_in_columns
from fedveil.registry import distributions_of
from fedveil.statement.statement_layout import to_dict, to_markdown
from fedveil.tasks.task_registry import built_in_task
from fedveil.verify import Finding
from fedveil.verify.ledger_file import read_json

_SUBJECT = "statement made again"
_TOLERANCE = 1e-9
"""Relative tolerance for numbers that the same versions computed."""
_DECIDES = ("numpy", "scipy")
_SHOWN = 6
_PROBLEMS = (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, IndexError, RecursionError, MemoryError)


def recertify(run: Path, *, trust_plugins: bool = False) -> list[Finding]:
    """Recompute the statement of a run directory and compare it with `statement.json` and `statement.md`.

    Args:
        trust_plugins: run the plugins that the configuration names, at their recorded digests.
    """
    try:
        config = load_config(run / "config.toml", trust_plugins=trust_plugins)
        card, stated = (json.loads((run / name).read_text(encoding="utf-8")) for name in ("data.json", "statement.json"))
        versions = json.loads((run / "versions.json").read_text(encoding="utf-8"))
        installed = {"fedveil": __version__, **{name: version(name) for name in _DECIDES}}
        installed |= {f"distribution {found.name}": found.version for found in distributions_of(config.code)}
        others = [f"{name} {versions.get(name)}, here {own}" for name, own in installed.items() if versions.get(name) != own]
        columns, malformed = _declared(run / "columns.json")
        if wrong := [*malformed, *_of_card(config, card)]:
            return [Finding("contradicted", _SUBJECT, "; ".join(wrong))]
        again = _statement(config, card)
        differ = list(differences(stated, to_dict(again)))
        differ += _relabelled(columns, config)
        if (run / "statement.md").is_file() and (run / "statement.md").read_bytes() != to_markdown(again).encode():
            differ.append("statement.md: another text")
    except FedveilError as problem:
        return [Finding("unknown", _SUBJECT, str(problem))]
    except (OSError, *_PROBLEMS) as problem:
        return [Finding("unknown", _SUBJECT, f"cannot be made from what is there ({problem})")]
    if not differ:
        return [Finding("verified", _SUBJECT, "configuration and data card give every number and every text of it")]
    more = [f"and {len(differ) - _SHOWN} more"] if len(differ) > _SHOWN else []
    text = "; ".join([*([f"made by {', '.join(others)}"] if others else []), *differ[:_SHOWN], *more])
    return [Finding("unknown" if others else "contradicted", _SUBJECT, text)]


def _declared(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the columns that the run declares, and the errors in their file."""
    try:
        columns = read_json(file.read_text(encoding="utf-8")) if file.is_file() else []
    except (ValueError, RecursionError) as problem:
        return [], [f"{file.name}: {problem}"]
    if isinstance(columns, list) and all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in columns):
        return columns, []
    return [], [f"{file.name}: expected a list of columns with their names, found something else"]


def _relabelled(columns: list[dict[str, Any]], config: Config) -> Iterator[str]:
    """Yield the built-in columns that the run declares with other texts."""
    built_in = built_in_columns(built_in_task(config.task.model_dump(exclude_unset=True) | {"name": config.task.name}))
    for entry in columns:
        if (column := built_in.get(entry["name"])) is not None:
            yield from differences(entry, asdict(column), f"columns.json: {column.name}")


def differences(stated: Any, again: Any, where: str = "") -> Iterator[str]:
    """Yield the differences of two JSON values, each with its place; numbers may differ within the tolerance."""
    if isinstance(stated, Mapping) and isinstance(again, Mapping):
        for key in dict.fromkeys([*again, *stated]):
            place = f"{where}.{key}" if where else key
            if key in stated and key in again:
                yield from differences(stated[key], again[key], place)
            else:
                yield f"{place}: {'missing' if key in again else 'not of a statement'}"
    elif isinstance(stated, list) and isinstance(again, list) and len(stated) == len(again):
        for i, (one, other) in enumerate(zip(stated, again, strict=True)):
            yield from differences(one, other, f"{where}[{i}]")
    elif _number(stated) and _number(again):
        if not math.isclose(stated, again, rel_tol=_TOLERANCE):
            yield f"{where}: expected {again!r}, found {stated!r}"
    elif (type(stated), stated) != (type(again), again):
        yield f"{where}: expected {_short(again)}, found {_short(stated)}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = f"{len(value)} entries" if isinstance(value, list) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _statement(config: Config, card: Mapping[str, Any]) -> Any:
    """Return the statement as `run` makes it, for the population of the card."""
    return certified(config, Population(_info(card), int(card["clients"]), int(card["nominal_examples_per_client"])))


def _info(card: Mapping[str, Any]) -> Info:
    """Return the facts about the data set in a card, as far as a statement needs them."""
    sizes = int(card["train_examples"]), int(card["test_examples"]), int(card.get("named_clients", 0))
    norm = card["normalisation"]
    shape, classes = tuple(map(int, card["examples"]["shape"])), int(card["labels"]["classes"])
    name, mean, std = str(card["name"]), tuple(norm["mean"]), tuple(norm["std"])
    target = Targets(tuple(map(int, card["labels"]["shape"])), card["labels"]["dtype"])
    vocabulary, features_of = int(card["examples"].get("vocabulary", 0)), str(card["examples"].get("features_of", ""))
    source, scale = str(card["source"]), norm["scale"]
    counted = tuple(map(str, (card.get("origin") or {}).get("counted", ())))
    return Info(name, "", shape, classes, *sizes, source, False, mean, std, scale, target, vocabulary, features_of, counted)


def _of_card(config: Config, card: Mapping[str, Any]) -> Iterator[str]:
    """Yield contradictions of the card with itself, the catalogue, and the configuration, unless a program passed in the data."""
    clients, nominal, users = card["clients"], card["nominal_examples_per_client"], card.get("named_clients", 0)
    by_users = config.data.partition.get("kind") == "users"  # users may have examples in both parts of the data set
    each = (card["train_examples"] + card["test_examples"] * by_users) // max(clients, 1) + 1
    if nominal > each:
        yield f"data.json: nominal_examples_per_client: expected at most {each}, found {nominal}"
    by_program = config.data.handed_over
    if "data" in by_program:
        return
    if by_program:  # the partition: only the number of clients is known
        changes = {"partition": {"kind": "iid", "clients": clients}, "handed_over": ()}
        config = config.model_copy(update={"data": config.data.model_copy(update=changes)})
    planned = population_of(config, refuse_unknown=False)
    if planned.clients and planned.clients != clients:
        yield f"data.json: clients: expected {planned.clients}, found {clients}"
    least, most = _nominal(config, planned, by_program=bool(by_program))
    if not least <= nominal <= most:
        expected = f"{least} to {most}" if least < most else least
        yield f"data.json: nominal_examples_per_client: expected {expected}, found {nominal}"
    if users != planned.data.users:
        yield f"data.json: named_clients: expected {planned.data.users}, found {users}"
    if (features := card["examples"].get("features_of", "")) != planned.data.features_of:
        yield f"data.json: features_of: expected {planned.data.features_of!r}, found {features!r}"
    if planned.data.classes != card["labels"]["classes"] or list(planned.data.input_shape) != card["examples"]["shape"]:
        yield f"data.json: expected examples of {planned.data.name}, found others"


def _nominal(config: Config, expected: Population, *, by_program: bool) -> tuple[float, float]:
    """Return the bounds of the nominal number of examples per client."""
    data, options = config.data, checked_options(config.data.partition)
    natural, given = isinstance(options, Users), getattr(options, "examples_per_client", None) is not None
    if given and not by_program:
        return expected.records, expected.records
    if not expected.records:  # depends on how the files were prepared
        return 0, math.inf
    if by_program or sized_by_labels(options) or (natural and expected.clients < expected.data.users):
        together = expected.data.train_size + expected.data.test_size * natural
        return 1, together // max(expected.clients, 1) + 1
    rounding = 2 if data.client_test_fraction else 1  # of the clients' splits, and of the division
    label_rounding = expected.data.classes if natural and expected.data.test_size else 0  # `split_within_users` rounds each label
    return expected.records - rounding, expected.records + rounding + label_rounding
