"""Honest runs of many kinds, drawn at random by a number: what verification must never accuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.methods.method_registry import METHODS

TASKS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "classification": lambda rng, n: rng.integers(0, 3, n),
    "binary": lambda rng, n: rng.integers(0, 2, n),
    "regression": lambda rng, n: rng.normal(40, 30, n).astype(np.float32),
    "multi-label": lambda rng, n: rng.integers(0, 2, (n, 3)).astype(np.float32),
    "survival": lambda rng, n: np.stack([rng.exponential(9, n), rng.integers(0, 2, n)], 1).astype(np.float32),
}
FACTS = {"classification": {"classes": 3}, "binary": {"classes": 2}}
OUTPUTS = {"classification": 3, "multi-label": 3}
NAMES: list[Callable[[int], Any]] = [
    int,
    "NA {}".format,
    "1_{:03d}".format,
    "Größe/{}".format,
    lambda c: -c,
    lambda c: c * 10**12,
]
FEATURES = 5


def table(rng: random.Random, task: str, clients: int) -> Any:
    """A table of a user: clients of different sizes, and a test set."""
    own = np.random.default_rng(rng.randrange(2**32))
    client = np.concatenate([np.arange(clients), own.integers(0, clients, clients * rng.choice([1, 6, 20]))])
    names = np.array(list(map(rng.choice(NAMES), range(clients))))
    inputs = own.normal(size=(len(client), FEATURES)).astype(np.float32)
    targets = TASKS[task](own, len(client))
    test = inputs[:12], targets[:12]
    return fv.from_arrays(inputs, targets, client=names[client], test=test, **FACTS.get(task, {}))


class Gated(nn.Module):
    """A network of a user that is no built-in one."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, outputs)

    def forward(self, x: Any) -> Any:
        return self.out(x * self.gate(x).sigmoid())


def drawn(rng: random.Random) -> tuple[dict[str, Any], Any]:
    """A configuration as keywords, and a user's table or None."""
    task = rng.choice(list(TASKS))
    digits, clients = rng.random() < 0.3, rng.choice([1, 2, 3, 5, 8, 21, 90])
    kind = METHODS[name := rng.choice(list(METHODS))]
    method: dict[str, Any] = {"name": name}
    if "variant" in kind.model_fields:
        method["variant"] = rng.choice(["proven", "proven", "published"])
    method |= {"separation": 1} if "separation" in kind.model_fields else {}
    method |= {"pretraining_steps": 5} if "pretraining_steps" in kind.model_fields else {}
    record = rng.random() < 0.4
    local = {"local": "dp-sgd", "example_clip": rng.choice([0.3, 1.0])} if record and rng.random() < 0.8 else {"batch_clip": 1.0}
    privacy = {
        "epsilon": rng.choice([0.1, 0.7, 1.0, 8.0, 123.456789, 1000.0, 10 ** rng.uniform(-2, 3)]),
        "delta": rng.choice([1e-2, 1e-3, 1.23456789e-4, 1e-5, 1e-9, 1e-13]),
        "view": rng.choice(["server", "aggregate", "aggregate", "final"]),
        "unit": "record" if record else "client",
        **({"adjacency": "replace_one"} if rng.random() < 0.2 else {}),
        **({"min_survivors": 1} if rng.random() < 0.1 else {}),
        **({"evaluation": {"share": 0.2, "examples": 4}} if rng.random() < 0.1 else {}),
    }
    training = {
        "rounds": rng.choice([1, 2, 3]),
        "clients_per_round": rng.choice([clients, max(1, clients // 2), max(1, clients // 7), 1]),
        "sampling": rng.choice(["fixed", "poisson"]),
        "local_steps": rng.choice([1, 2]),
        "batch_size": rng.choice([4, 16]),
        "optimizer": {"lr": rng.choice([0.1, 1 / 3, 10 ** rng.uniform(-6, 0)])},
        **({"server_optimizer": {"name": rng.choice(["sgd", "adam"]), "lr": 1 / 7}} if rng.random() < 0.1 else {}),
        **local,
    }
    kept = {"client_test_fraction": rng.choice([0.2, 1 / 3])} if rng.random() < 0.2 else {}
    kept |= {"public_fraction": rng.choice([0.1, 1 / 7])} if digits and rng.random() < 0.3 else {}
    sections: dict[str, Any] = {
        "method": method,
        "training": training,
        "privacy": privacy if name != "fedavg" or "example_clip" in local else {},
        "run": {"seed": rng.randrange(1000), "engine": "inline", "seeded_noise": rng.random() < 0.3}
        | ({"final_model": rng.choice(["tail", "ema"])} if rng.random() < 0.2 else {}),
    }
    if digits:
        data = {"name": "digits", "partition": rng.choice([{"kind": "iid"}, {"kind": "dirichlet", "alpha": 0.5}])}
        data["partition"] |= {"clients": clients}
        model = rng.choice([{"name": "linear"}, {"name": "mlp", "hidden": [8]}])
        return {**sections, "data": data | kept, "model": model}, None
    task_section: dict[str, Any] = {"name": task, **({"mean": 40, "scale": 30} if task == "regression" else {})}
    hazards = task == "survival" and rng.random() < 0.5
    task_section |= {"likelihood": "hazards", "edges": [2, 7.5]} if hazards else {}
    model = rng.choice(["linear", "mlp", Gated(OUTPUTS.get(task, 2 if hazards else 1))])
    return {**sections, "task": task_section, "model": model, "data": kept}, table(rng, task, clients)


def honest_run(number: int, folder: Path) -> tuple[str, Path, int]:
    """Make the run of that number, perhaps interrupted, resumed or published.

    Returns:
        What it is, its directory, and the exit status that verification must have: 0, or 2 where the run has not ended.
    """
    rng = random.Random(number)
    while True:
        sections, data = drawn(rng)
        try:
            config = fv.configure(**sections)
            fv.certify(config, data=data)
        except ConfigError:
            continue
        break
    fate = rng.choice(["ended", "ended", "interrupted", "resumed", "published"])
    words = f"{number}: {sections['method']} {sections['privacy']} {sections['training']} {sections['model']}, {fate}"
    path, rounds = folder / f"run-{number}", sections["training"]["rounds"]
    if fate in ("interrupted", "resumed"):
        last = rng.randrange(rounds)

        def interrupt(row: dict[str, Any]) -> None:
            if row["round"] == last:
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            fv.train(config, path, interrupt, data=data)
        if fate == "interrupted":
            return words, path, 2
    fv.train(config, path, data=data, resume=fate == "resumed")
    if fate == "published":
        fv.publish(path, folder / f"published-{number}")
        return words, folder / f"published-{number}", 0
    return words, path, 0
