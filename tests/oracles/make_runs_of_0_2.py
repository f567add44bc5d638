"""Make the run directories of version 0.2 beside this file, with the code of commit f8a1b0cf (not with today's).

    git worktree add /tmp/fedveil-0.2 f8a1b0cf
    PYTHONPATH=/tmp/fedveil-0.2/src python tests/oracles/make_runs_of_0_2.py

They are checked in: today's code has to read, verify and report them as version 0.2 did.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from fedveil.run.published_copy import publish
from torch import nn

import fedveil as fv

HERE = Path(__file__).parent / "runs-0.2"
DIGITS = {"name": "digits", "partition": {"kind": "iid", "clients": 20}}
TRAINING = {"rounds": 3, "clients_per_round": 10, "local_steps": 2, "batch_size": 16}
LINEAR = {"name": "linear"}
PRIVACY = {"epsilon": 8.0, "delta": 1e-3}


def made(name: str, method: dict[str, Any], privacy: dict[str, Any], training: dict[str, Any] | None = None, **more: Any) -> Path:
    """Train and return the directory; seeded batches, secret noise."""
    sections = {"data": DIGITS, "model": LINEAR, **more.pop("sections", {})}
    config = fv.configure(method=method, privacy=privacy, training=TRAINING | (training or {}), run={"seed": 7}, **sections)
    return fv.train(config, HERE / name, **more).path


def table() -> Any:
    """A user's regression table of 30 clients."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5, 0.0]) + 3).astype(np.float32)
    return fv.from_arrays(x, y, client=np.arange(300) % 30, test=(x[:40], y[:40]))


def stop_after(rounds: int) -> Any:
    def on_round(row: dict[str, Any]) -> None:
        if row["round"] == rounds - 1:
            raise KeyboardInterrupt

    return on_round


def main() -> None:
    """Make all ten."""
    shutil.rmtree(HERE, ignore_errors=True)
    dp = {"name": "dp-fedavg", "clip": 0.5}
    made("poisson-aggregate", dp, PRIVACY | {"view": "aggregate"}, {"sampling": "poisson"})
    record = {"unit": "record", "epsilon": 4.0, "delta": 1e-4, "view": "server"}
    made("dp-sgd-server", {"name": "dp-fedavg"}, record, {"local": "dp-sgd", "example_clip": 1.0})
    noisy = {"name": "noisy-fedavg", "variant": "proven"}
    made("noisy-fedavg-final", noisy, PRIVACY | {"view": "final"}, {"sampling": "fixed", "batch_clip": 1.0})
    clipped = {"batch_clip": 1.0}
    made("ladp-fl-published", {"name": "ladp-fl", "variant": "published"}, PRIVACY | {"view": "server"}, clipped)
    made("fedglp-adp-server", {"name": "fedglp-adp"}, PRIVACY | {"view": "server"})
    banded = {"name": "banded-mf", "separation": 2}
    made("banded-mf-aggregate", banded, PRIVACY | {"view": "aggregate"}, {"sampling": "fixed"})
    made("fedavg-no-noise", {"name": "fedavg"}, {})
    own = {
        "model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
        "task": {"name": "regression", "mean": 3, "scale": 2},
    }
    made("own-table", dp, PRIVACY | {"view": "aggregate"}, sections={**own, "data": {}}, data=table())
    with suppress(KeyboardInterrupt):
        made("interrupted-server", dp, PRIVACY | {"view": "server"}, on_round=stop_after(2))
    whole = made("whole", {"name": "adaptive-clipping"}, PRIVACY | {"view": "aggregate"})
    publish(whole, HERE / "published-copy")
    shutil.rmtree(whole)


if __name__ == "__main__":
    main()
