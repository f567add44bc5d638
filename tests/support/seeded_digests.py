"""Digests of seeded runs: what a change of the code's structure must leave as it is, to the bit."""

from __future__ import annotations

import csv
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import fedveil as fv
from federation_runs import OWN, config, every_method, prepared, small_digits
from fedveil.attacks.audit_run import audit_config
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.new_project import demo_config
from fedveil.methods.method_registry import METHODS
from task_runs import TASKS, made, small

ORACLES = Path(__file__).parents[1] / "oracles"
USER_DEFINED = "user-defined"
ENGINES = ("inline", "pool", "stacked", "batched")
_TIMES = {"seconds"}
_DRAWN_ANEW = {"time", "run", "sealed", "nonce", "digest"}
_MORE: dict[str, dict[str, Any]] = {
    "poisson": {"training": {"sampling": "poisson"}},
    "replace-one": {"privacy": {"adjacency": "replace_one"}},
    "survivors": {"privacy": {"min_survivors": 2}},
    "participations": {"privacy": {"view": "server", "max_participations": 2}},
    "evaluation": {"privacy": {"evaluation": {"share": 0.2, "examples": 4}}, "data": {"client_test_fraction": 0.3}},
    "grid": {"privacy": {"grid_bits": 12}},
    "tail": {"run": {"final_model": "tail"}},
    "average": {"run": {"final_model": "ema"}},
    "adam": {"training": {"optimizer": {"name": "adam", "lr": 0.01}, "server_optimizer": {"name": "yogi", "lr": 0.1}}},
    "dirichlet": {"data": {"partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 6}}},
    "personal": {"training": {"measure_trained": True}, "data": {"client_test_fraction": 0.3}},
}


def seeded_runs() -> Iterator[tuple[str, Config, Any]]:
    """Yield name, configuration and data: each method, variant, view and unit; more of a configuration; models; tasks."""
    for name, configuration in every_method():
        yield name, configuration, None
    for name, kind in METHODS.items():
        for variant in ["published", "proven"] if "variant" in kind.model_fields else [None]:
            for view in ("server", "aggregate", "final"):
                method = {"name": name, **OWN.get(name, ({}, {}))[0]} | ({} if variant is None else {"variant": variant})
                local = {"local": "dp-sgd", "example_clip": 1.0, "batch_clip": None}
                try:
                    found = config(method, view, training=local, privacy={"unit": "record", "delta": 1e-3, "epsilon": 8.0})
                    fv.certify(found, data=small_digits())
                except ConfigError:
                    continue
                yield "-".join(filter(None, (name, variant, view, "record"))), found, None
    for name, sections in _MORE.items():
        yield f"with {name}", config({"name": "dp-fedavg"}, **sections), None
    for model in ("linear", "cnn2", "vit-small"):
        yield f"model {model}", fv.replace(config({"name": "dp-fedavg"}, training={"rounds": 1}), {"model": model}), None
    yield from user_defined()
    for name in TASKS:
        for level in ("client", "record"):
            if level == "client" or name != "cox":
                yield f"task {name}, {level}", small(name, level=level), made(name)


class Residual(nn.Module):
    """A user-defined network whose forward pass no list of layers tells."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, 10]."""
        x = self.first(x.flatten(1)).relu()
        return cast(torch.Tensor, self.last(x + self.inner(x).tanh()))


def user_defined() -> Iterator[tuple[str, Config, Any]]:
    """User-defined networks: their bits may change once, with the way in which their gradients are taken."""
    for local in ("sgd", "dp-sgd"):
        record = {} if local == "sgd" else {"unit": "record", "delta": 1e-3}
        given = config({"name": "dp-fedavg"}, training={"local": local}, privacy=record)
        for name, module in (("residual", Residual), ("sequential", _sequential)):
            torch.manual_seed(0)
            yield f"{USER_DEFINED} {name}, {local}", fv.replace(given, {"model": module()}), None


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10))


def audited() -> Iterator[tuple[str, Config]]:
    """One form of each built-in method, to be audited with a fixed seed."""
    last: dict[str, Config] = {}
    for _, configuration in every_method():
        last.setdefault(configuration.method.name, configuration)
    yield from last.items()


def digest(configuration: Config, data: Any, engine: str, folder: Path) -> str:
    """Train, and return a SHA-256 of the model, the ledger, the history and the statement, without times and names."""
    section = configuration.run.model_copy(update={"engine": engine})
    chosen = configuration.model_copy(update={"run": section})
    partition = prepared(chosen).partition if data is None else None
    run = fv.train(chosen, folder, data=small_digits() if data is None else data, partition=partition).path
    return digest_of(run)


def demo_digest(folder: Path) -> str:
    """Return the digest of the demo with seeded noise, so that its model is the same each time."""
    demo = demo_config()
    run = fv.train(demo.model_copy(update={"run": demo.run.model_copy(update={"seeded_noise": True, "seed": 3})}), folder).path
    return digest_of(run)


def audit_numbers(configuration: Config) -> list[str]:
    """Return the lower bound of each audit of a configuration, from few canaries and a fixed seed."""
    try:
        statement = audit_config(configuration, n=40)
    except ConfigError as refusal:
        return [str(refusal)]
    return [f"{view.view} {audit.epsilon:.12g}" for view in statement.views for audit in view.audits]


def digest_of(run: Path) -> str:
    """Return digests of the run in this directory, without times and what is drawn anew each time: of its bits, its statement."""
    bits, statement = "\n".join(_parts(run)), (run / "statement.json").read_text(encoding="utf-8")
    return " ".join(hashlib.sha256(text.encode()).hexdigest()[:16] for text in (bits, statement))


def _parts(run: Path) -> Iterator[str]:
    for name, tensor in sorted(load_file(run / "model.safetensors").items()):
        yield f"{name} {hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()}"
    with sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        ledger.row_factory = sqlite3.Row
        for row in ledger.execute("SELECT * FROM release ORDER BY round, client, seq"):
            yield json.dumps({key: row[key] for key in row.keys() if key not in _DRAWN_ANEW | {"seq"}})  # noqa: SIM118
    for table in ("history.csv", "private/history.csv", "layers.csv", "private/layers.csv", "private/clients.csv"):
        if (run / table).exists():
            with (run / table).open(encoding="utf-8", newline="") as lines:
                yield from (json.dumps({k: v for k, v in row.items() if k not in _TIMES}) for row in csv.DictReader(lines))


def machine() -> str:
    """Return a digest of how this machine and torch round: runs are the same to the bit only where it is the same."""
    torch.set_num_threads(1)  # as the tests' session does, which begins after the test files are imported
    torch.manual_seed(0)
    x, kernel = torch.randn(33, 3, 9, 9), torch.randn(7, 3, 3, 3, requires_grad=True)
    layer = torch.nn.Linear(343, 10)
    loss = F.cross_entropy(layer(F.conv2d(x, kernel).tanh().flatten(1)), torch.arange(33) % 10)
    loss.backward()
    parts = [loss, kernel.grad, layer.weight.grad, torch.randn(1000, dtype=torch.float64).exp().cumsum(0)]
    return hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()[:16]
