"""From the command to the first round on disk (workload W1), and what the lighter commands take; fastest of several starts.

    python benchmarks/first_round.py --repeats 5

Writes benchmarks/results/first_round.json. `fedveil run` is watched until the first row is in `history.csv`: LeNet-5, 10 clients
of 600 examples from a file as large as MNIST (random pictures), DP-FedAvg with a calibrated epsilon, secret noise, ledger and
checkpoint, as a user runs it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness import arguments
from sides import save

CONFIG = """
[data]
name = "mnist"
data_dir = "{folder}"
download = false
partition = {{ kind = "iid", clients = 10, examples_per_client = 600 }}
[model]
name = "lenet5"
[method]
name = "dp-fedavg"
[training]
rounds = 1000
batch_size = 32
optimizer = {{ name = "sgd", lr = 0.05 }}
evaluate_every = 1000
[privacy]
epsilon = 8.0
delta = 1e-5
"""
PYTHON = sys.executable


def prepared(folder: Path) -> Path:
    """The configuration and its data set."""
    draw, sizes = np.random.default_rng(0), {"train": 60_000, "test": 10_000}
    parts = {f"x_{split}": draw.integers(0, 256, (n, 28, 28), dtype=np.uint8) for split, n in sizes.items()}
    labels = {f"y_{split}": draw.integers(0, 10, n) for split, n in sizes.items()}
    np.savez(folder / "mnist.npz", **parts, **labels)
    config = folder / "w1.toml"
    config.write_text(CONFIG.format(folder=folder))
    return config


def first_round(config: Path, out: Path) -> float:
    """Seconds until the first row of the history is there."""
    start = time.perf_counter()
    with subprocess.Popen([PYTHON, "-m", "fedveil", "run", str(config), "--quiet", "--out", str(out)]) as run:
        while not (out / "history.csv").exists():
            if run.poll() is not None:
                raise RuntimeError("fedveil run ended before its first round")
            time.sleep(0.002)
        seconds = time.perf_counter() - start
        run.terminate()
    return seconds


def seconds(*command: str) -> float:
    """What a command takes."""
    start = time.perf_counter()
    subprocess.run([PYTHON, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    repeats = arguments(__doc__, repeats=5).repeats
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = prepared(folder)
        commands: dict[str, Callable[[int], float]] = {
            "python -c pass": lambda _: seconds("-c", "pass"),
            "import fedveil": lambda _: seconds("-c", "import fedveil"),
            "import torch": lambda _: seconds("-c", "import torch"),
            "fedveil certify": lambda _: seconds("-m", "fedveil", "certify", str(config)),
            "fedveil run, first round": lambda i: first_round(config, folder / f"run{i}"),
        }
        turns = [{name: take(i) for name, take in commands.items()} for i in range(repeats)]
    times = {name: [turn[name] for turn in turns] for name in commands}
    for name, values in times.items():
        print(f"{name:>26}  {min(values):.2f} s")
    save("first_round", {name: {"seconds": values} for name, values in times.items()})
