"""Made-up data, a network and a small configuration for each task, shared by the tests of the tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedveil.data.catalogue import IGNORED, Info, Targets
from fedveil.data.dataset import Dataset
from fedveil.experiment.assembly import federation
from fedveil.experiment.config import Config, configure
from fedveil.experiment.resolve import opened
from fedveil.federation.progress import Federation
from fedveil.ledger.ledger import Ledger

TASKS: dict[str, dict[str, Any]] = {
    "classification": {"name": "classification", "class_weights": [1.0, 2.0, 0.5]},
    "binary": {"name": "binary", "positive_weight": 2.0},
    "multi-label": {"name": "multi-label", "positive_weights": [1.0, 2.0, 3.0, 0.5]},
    "regression": {"name": "regression", "error": "huber", "mean": 0.5, "scale": 2.0},
    "segmentation": {"name": "segmentation", "dice": 0.5, "class_weights": [1.0, 2.0, 0.5]},
    "token-prediction": {"name": "token-prediction"},
    "cox": {"name": "survival"},
    "hazards": {"name": "survival", "likelihood": "hazards", "edges": [0.5, 1.0, 2.0, 4.0]},
}
"""The section of each, with constants that are not the defaults."""
BY_EXAMPLE = [name for name in TASKS if name != "cox"]
FEATURES, CLASSES, PLACES, SIDE, SYMBOLS = 6, 3, 5, 4, 7
CLIENTS, TRAIN, TEST = 6, 96, 40


class Sequence(nn.Module):
    """What is known of each token alone: [n, T] to [n, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.map = nn.Embedding(SYMBOLS, 4), nn.Linear(4, SYMBOLS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.map(self.known(x))
        return out


def info(shape: tuple[int, ...], classes: int, target: Targets) -> Info:
    """A card of made-up data."""
    channels = (0.0,) * shape[0], (1.0,) * shape[0]
    return Info("made", "", shape, classes, TRAIN, TEST, 0, "made", False, *channels, 1.0, target)


def _rows(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).normal(size=(count, FEATURES)).astype(np.float32)


def _scores(x: Any, columns: int) -> Any:
    return x @ np.random.default_rng(2).normal(size=(x.shape[-1], columns))


def _picture(count: int) -> tuple[Info, Any, Any]:
    rng = np.random.default_rng(1)
    y = rng.integers(0, CLASSES, (count, SIDE, SIDE))
    x = (y[:, None] + 0.3 * rng.normal(size=(count, 1, SIDE, SIDE))).astype(np.float32)
    y[:, 0, 0] = IGNORED
    return info((1, SIDE, SIDE), CLASSES, Targets((SIDE, SIDE))), x, y


def _sequence(count: int) -> tuple[Info, Any, Any]:
    """The next token is one more, but for some noise; the last place has none."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, SYMBOLS, (count, PLACES))
    y = (x + 1 + (rng.random(x.shape) < 0.1)) % SYMBOLS
    y[:, -1] = IGNORED
    card = info((PLACES,), SYMBOLS, Targets((PLACES,)))
    return replace(card, vocabulary=SYMBOLS), x, y


def _survival(count: int) -> tuple[Info, Any, Any]:
    rng, x = np.random.default_rng(3), _rows(count)
    time = rng.exponential(np.exp(-_scores(x, 1)[:, 0]))
    censored = rng.exponential(2.0, count)
    y = np.stack([np.ceil(10 * np.minimum(time, censored)) / 10, time <= censored], 1).astype(np.float32)
    return info((FEATURES,), 0, Targets((2,), "float32")), x, y


def _table(classes: int, target: Targets, of: Callable[[Any], Any]) -> Callable[[int], tuple[Info, Any, Any]]:
    return lambda count: (info((FEATURES,), classes, target), _rows(count), of(_rows(count)).astype(target.dtype))


MLP = {"name": "mlp", "hidden": [8]}
_MADE: dict[str, tuple[Any, Callable[[int], tuple[Info, Any, Any]]]] = {
    "classification": (MLP, _table(CLASSES, Targets(), lambda x: _scores(x, CLASSES).argmax(1))),
    "binary": (MLP, _table(2, Targets(), lambda x: _scores(x, 1)[:, 0] > 1)),
    "multi-label": (MLP, _table(0, Targets((4,), "float32"), lambda x: _scores(x, 4) > 1)),
    "regression": (MLP, _table(0, Targets((), "float32"), lambda x: _scores(x, 1)[:, 0])),
    "segmentation": (lambda: nn.Conv2d(1, CLASSES, 3, padding=1), _picture),
    "token-prediction": (Sequence, _sequence),
    "cox": (MLP, _survival),
    "hazards": (MLP, _survival),
}


@cache
def made(name: str) -> Dataset:
    """Data that can be learned from."""
    card, x, y = _MADE[name][1](TRAIN + TEST)
    return Dataset(card, x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:])


def small(name: str, view: str = "aggregate", level: str = "client", **more: Any) -> Config:
    """Six clients, four a round, three rounds, seeded noise; at record level by DP-SGD."""
    record = level == "record"
    sections: dict[str, Any] = {
        "task": TASKS[name],
        "model": _MADE[name][0],
        "method": {"name": "dp-fedavg", "clip": 0.5},
        "data": {"partition": {"kind": "iid", "clients": CLIENTS}, "client_test_fraction": 0.2},
        "training": {"rounds": 3, "clients_per_round": 4, "batch_size": 8, "local": "dp-sgd" if record else "sgd"},
        "privacy": {"epsilon": 8.0, "delta": 1e-3 if record else 0.01, "view": view, "unit": level},
        "run": {"seeded_noise": True, "seed": 3, "engine": "inline"},
    }
    for section, values in more.items():
        sections[section] = {**sections[section], **values}
    return configure(**sections)


def assembled(config: Config, name: str, folder: Path) -> Federation:
    """The federation of a configuration on the data made up for a task, with its ledger in that folder."""
    folder.mkdir(parents=True)
    Ledger.create(folder / "ledger.sqlite", "r", {}).close()
    return federation(*opened(config, made(name)), folder / "ledger.sqlite", "r")
