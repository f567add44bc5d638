"""The command that looks at the machine: doctor."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from fedveil.cli.command_options import print_table

commands = typer.Typer()

_OPTIONAL = {
    "tensorboard": ("tensorboard", "live curves"),
    "mlflow": ("mlflow-skinny", "runs in MLflow"),
    "flower": ("flwr", "clients on machines of their own"),
    "parquet": ("pyarrow", "tables in Parquet files"),
}
"""Extra of `pip install fedveil[...]`: the package that it brings, and what for."""


@commands.command()
def doctor() -> None:
    """Look at this machine: versions, cores, memory, GPU, disk, data sets, optional parts."""
    typer.echo("Importing PyTorch, looking for a GPU and data sets, timing the disk: some seconds ...", err=True)
    import torch

    from fedveil import __version__
    from fedveil.data.catalogue import CATALOGUE
    from fedveil.data.load import ENVIRONMENT, located
    from fedveil.engines.device import gpu_problem
    from fedveil.training.cores import available_cores

    cores = available_cores()
    problem = gpu_problem()
    here = [name for name in CATALOGUE if located(name)]
    named = os.environ.get(ENVIRONMENT)
    print_table(
        [
            ("fedveil", f"{__version__} with PyTorch {torch.__version__}, Python {platform.python_version()}"),
            ("cores", f"{cores}; run.engine = 'auto' takes {'one worker process each' if cores > 1 else 'this process alone'}"),
            ("memory", _memory()),
            ("GPU", f"none ({problem})" if problem else torch.cuda.get_device_name(0)),
            ("disk", f"{shutil.disk_usage('.').free / 1e9:.1f} GB free here; {_writing()}"),
            ("data", f"{ENVIRONMENT} is {named or 'not set'}; here: {', '.join(here)}; the others: fedveil data"),
            *((f"[{extra}]", _part(extra, package, use)) for extra, (package, use) in _OPTIONAL.items()),
            ("ssh-keygen", "found" if shutil.which("ssh-keygen") else "not found: fedveil sign needs it"),
        ]
    )


def _memory() -> str:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        total, free = (int(lines[key].split()[0]) / 1e6 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return "unknown on this system"
    return f"{free:.1f} of {total:.1f} GB available"


def _writing() -> str:
    """How long one small write takes until it is safe, the least of three; each round has at least one."""
    least = float("inf")
    try:
        with tempfile.NamedTemporaryFile(dir=".", prefix=".fedveil-") as file:
            for _ in range(3):
                begun = time.perf_counter()
                file.write(b"fedveil")
                file.flush()
                os.fsync(file.fileno())
                least = min(least, time.perf_counter() - begun)
    except OSError as error:
        return f"nothing can be written here ({error.strerror})"
    return f"a ledger's write takes {1000 * least:.1f} ms"


def _part(extra: str, package: str, use: str) -> str:
    try:
        return f"{package} {version(package)}: {use}"
    except PackageNotFoundError:
        return f"not installed: {use} (pip install 'fedveil[{extra}]')"
