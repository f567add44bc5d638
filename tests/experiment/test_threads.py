"""Runs, readings and certificates in threads of one process: each as if it were alone, and the process left as it was."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.result import Result
from fedveil.models import model_registry

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(60, 4)).astype("float32"), DRAW.integers(0, 3, 60)
OWNERS = np.arange(60) % 6


def data() -> fv.Dataset:
    return fv.from_arrays(X, Y, client=OWNERS, test=(X[:10], Y[:10]))


class Noisy(torch.utils.data.Dataset[Any]):
    """Items that draw from all three global generators, slowly enough for another thread to come between."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        self.wait()
        return torch.tensor(X[i]) + torch.randn(4) + np.random.rand() + random.random(), int(Y[i])  # noqa: NPY002


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def config(engine: str = "inline", **training: Any) -> Config:
    return fv.configure(
        model=net,
        method="fedavg",
        training={"rounds": 2, "local": "dp-sgd", "batch_size": 4, **training},
        privacy={"unit": "record", "epsilon": 8.0, "delta": 1e-2},
        run={"seed": 1, "seeded_noise": True, "engine": engine},
    )


def trained(path: Path, engine: str = "inline") -> torch.Tensor:
    model = fv.train(config(engine), path, data=data()).model
    assert model is not None
    return model.vector


def read(wait: Callable[[], object] = lambda: None) -> torch.Tensor:
    return torch.from_numpy(fv.from_torch(Noisy(wait), client=OWNERS).x_train)


def certified() -> tuple[float, str]:
    """What builds the network, for its shapes and the digest of its initial values."""
    statement = fv.certify(config(), data=data())
    return statement.proven.epsilon, str(statement.assumptions)


def states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), (kind, np.asarray(keys).tolist(), *rest), torch.get_default_dtype()


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """What each job returns or raises, all of them in threads that begin together."""
    found: list[Any] = [None] * len(jobs)
    begin = threading.Barrier(len(jobs))

    def one(i: int, job: Callable[[], Any]) -> None:
        begin.wait()
        try:
            found[i] = job()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=one, args=(i, job)) for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.heavy
def test_threads_take_turns(tmp_path: Path) -> None:
    """Two runs refused each other's networks, seeds decided neither, and numpy's generator stayed changed."""
    alone = [trained(tmp_path / "alone"), trained(tmp_path / "pool", "pool"), read(), certified()]
    before = states()
    jobs = [
        lambda: trained(tmp_path / "a"),
        lambda: trained(tmp_path / "b", "pool"),
        lambda: read(lambda: threading.Event().wait(1e-3)),
        certified,
        lambda: trained(tmp_path / "c"),
        read,
    ]
    wanted = [*alone, alone[0], alone[2]]
    for found, right in zip(at_once(*jobs), wanted, strict=True):
        assert type(found) is type(right), found
        assert torch.equal(found, right) if isinstance(right, torch.Tensor) else found == right
    assert states() == before


def test_a_network_is_built_in_turns(tmp_path: Path) -> None:
    """`model_registry.build` seeds the global generator; a thread that seeds it meanwhile made another network."""

    def build() -> torch.Tensor:
        module = model_registry.build("mlp", (64,), 10, seed=5)
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    right = build()
    assert all(torch.equal(found, right) for found in at_once(*[build] * 6))


@pytest.mark.parametrize("model", ["linear", "mlp", net, "module"])
def test_float64_by_default_changes_nothing(model: Any, tmp_path: Path) -> None:
    """Built-in networks were refused for parameters that the user never made."""

    def run(folder: str) -> Result:
        chosen = fv.configure(model=ready if model == "module" else model, method="dp-fedavg", **SECTIONS)
        return fv.train(chosen, tmp_path / folder, data=data())

    SECTIONS: dict[str, Any] = {
        "training": {"rounds": 1},
        "privacy": {"epsilon": 8.0, "delta": 1e-2},
        "run": {"seeded_noise": True, "engine": "inline"},
    }
    ready = net()
    first = run("first")
    torch.set_default_dtype(torch.float64)
    try:
        second = run("second")
        assert torch.get_default_dtype() == torch.float64
        with pytest.raises(ConfigError, match=r"float64.*\.float\(\)"):
            fv.train(fv.configure(model=net(), method="dp-fedavg", **SECTIONS), tmp_path / "third", data=data())
        assert torch.get_default_dtype() == torch.float64, "also where a run fails"
    finally:
        torch.set_default_dtype(torch.float32)
    assert second.score == first.score
    assert torch.equal(second.model.vector, first.model.vector)
