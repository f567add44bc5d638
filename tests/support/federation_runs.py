"""Small runs over every method, shared by the tests of engines and checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.accounting.types import View
from fedveil.data.dataset import Dataset
from fedveil.data.load import load
from fedveil.errors import ConfigError
from fedveil.experiment import rehearsal
from fedveil.experiment.assembly import Prepared, federation, prepare
from fedveil.experiment.config import Config, configure
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.resolve import data_spec, resolve
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.round import Engine
from fedveil.ledger.ledger import Ledger
from fedveil.methods.gradient_compression import Defence
from fedveil.methods.method_registry import METHODS
from fedveil.training.params import FlatModel

DEFENCES = {name for name, kind in METHODS.items() if issubclass(kind, Defence)}
"""Methods that promise nothing, and work in the server view only."""


@cache
def small_digits() -> Dataset:
    """A tenth of the embedded digits."""
    full = load("digits")
    return Dataset(full.info, full.x_train[:150], full.y_train[:150], full.x_test[:60], full.y_test[:60])


def config(method: dict[str, Any], view: str = "aggregate", **more: Any) -> Config:
    """Six clients, four a round, three rounds, seeded noise, unless told otherwise."""
    private = {"view": view} if method["name"] in DEFENCES else {"epsilon": 8.0, "delta": 0.01, "view": view}
    private = {} if method["name"] in ("fedavg", "scaffold") else private
    sections: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}},
        "training": {
            "rounds": 3,
            "clients_per_round": 4,
            "local_steps": 3,
            "batch_size": 16,
            "batch_clip": 1.0,
            "sampling": "fixed",
        },
        "privacy": private,
        "run": {"seeded_noise": True, "seed": 3, "engine": "inline"},
    }
    for section, values in more.items():
        sections[section] = {**sections[section], **values}
    return configure(method=method, **sections)


SPACED = {"data": {"partition": {"kind": "iid", "clients": 12}}}
"""Enough clients for a participation rule."""
BY_RECORD = {"training": {"local": "dp-sgd"}, "privacy": {"unit": "record", "delta": 1e-3}}
"""DP-SGD inside the clients."""
OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "banded-mf": ({"separation": 2}, SPACED),
    "fedanc": ({"pretraining_steps": 20}, {}),
    "adap-dp-fl": ({}, BY_RECORD),
}
"""What a method needs beyond `config`: parameters of its own, and sections."""


@cache
def every_method() -> tuple[tuple[str, Config], ...]:
    """Each method of the registry, in each variant and each view that it accepts."""
    return tuple(_every_method())


def _every_method() -> Iterator[tuple[str, Config]]:
    for name, kind in METHODS.items():
        variants = ["published", "proven"] if "variant" in kind.model_fields else [None]
        for variant in variants:
            for view in [v.value for v in View]:
                own, sections = OWN.get(name, ({}, {}))
                method = {"name": name, **own} if variant is None else {"name": name, "variant": variant, **own}
                try:
                    configuration = config(method, view, **sections)
                    calibrated_setting(configuration, prepared(configuration).population)
                except ConfigError:
                    continue
                yield "-".join(filter(None, (name, variant, view))), configuration


def covering(runs: Mapping[str, Config], turn: int = 0, always: Collection[str] = ()) -> list[Any]:
    """The names as parameters: all forms of DP-FedAvg, one of each other method and what is `always` run are fast, the rest slow.

    From method to method it is the next form, so that each variant and view is seen; another `turn` begins at another form.
    The last model alone, whose price is its own for the noisy ones only, is seen with DP-FedAvg and one of these.
    """
    forms: dict[str, list[str]] = {}
    for name, configuration in runs.items():
        forms.setdefault(configuration.method.name, []).append(name)
    assert runs.keys() >= {*always}
    fast = {*forms.pop("dp-fedavg"), "noisy-fedavg-proven-final", *always}
    for number, names in enumerate(forms.values()):
        names = [name for name in names if "final" not in name]
        fast.add(names[(number + turn) % len(names)])
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in runs]


_PREPARED: dict[str, Prepared] = {}


def prepared(configuration: Config) -> Prepared:
    """The small digits dealt out, once for each way of dealing."""
    key = str(configuration.data)
    if key not in _PREPARED:
        _PREPARED[key] = prepare(data_spec(configuration), small_digits())
    return _PREPARED[key]


def job(configuration: Config, folder: Path) -> Federation:
    """The federation of a configuration, with the ledger in that folder, or a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "ledger.sqlite").exists():
        Ledger.create(folder / "ledger.sqlite", "r", {}).close()
    data = prepared(configuration)
    return federation(resolve(configuration, data.population), data, folder / "ledger.sqlite", "r")


def rehearsed(configuration: Config) -> FlatModel:
    """The network of a configuration, once its rehearsal has passed."""
    data = prepared(configuration)
    return rehearsal.rehearsed(resolve(configuration, data.population), data)[0]


def charged(folder: Path) -> list[Any]:
    """What the ledger of `job` holds, ordered by round and client."""
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        entries = [entry for _, _, entry in ledger.entries()]
    return sorted(entries, key=lambda e: (e.round, e.client))


def bits(tensor: Any) -> bytes:
    """The exact contents."""
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def finished(run: Federation, runner: Engine) -> Progress:
    """The run from its start to its planned end."""
    progress = start(run)
    assert fit(run, runner, progress) == ""
    return progress


def compared(progress: Progress) -> list[dict[str, Any]]:
    """The history without its times."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in progress.history]


def same_state(a: Any, b: Any) -> bool:
    """Whether two states are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    return bool(a == b)


def assert_same(one: Progress, other: Progress) -> None:
    """Equal models, histories and states."""
    assert bits(one.model) == bits(other.model)
    assert repr(compared(one)) == repr(compared(other))
    for part in ("common", "policies", "privates", "seen", "server"):
        assert same_state(getattr(one, part), getattr(other, part)), part


def gone(pid: int) -> bool:
    """Whether a process has ended (Linux)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"
