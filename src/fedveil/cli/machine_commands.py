"""Commands about this machine: its data sets, and doctor."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedveil.cli.command_options import (
    DataDirectory,
    OptionalConfig,
    Overrides,
    Preset,
    TrustPlugins,
    configuration,
    data_set_names,
    print_json,
    print_table,
)
from fedveil.errors import missing_extra, nearest


class _DataCommands(TyperGroup):
    """Group of the data commands; for an unknown one it also suggests a data set with a similar name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if hasattr(error, "message"):
                from fedveil.data.catalogue import CATALOGUE

                error.message += f" A data set is got with `fedveil data get NAME`{nearest(args[0], CATALOGUE)}."
            raise


data_app = typer.Typer(
    cls=_DataCommands,
    help="List the data sets and where they lie, get one, or plot how a configuration partitions one.",
    invoke_without_command=True,
)


@data_app.callback()
def data(context: typer.Context) -> None:
    """List the data sets, and where each lies on this machine."""
    if context.invoked_subcommand is None:
        from fedveil.data.catalogue import CATALOGUE, downloadable
        from fedveil.data.load import ENVIRONMENT, located

        places = {name: located(name) for name in CATALOGUE}
        missing = {name: "downloaded when first used" if downloadable(name) else "to be made by hand" for name in CATALOGUE}
        print_table([(i.name, f"{i.title} {i.input_shape}: {places[i.name] or missing[i.name]}") for i in CATALOGUE.values()])
        typer.echo(f"\nHow to get one: fedveil data get NAME. Where they are looked for: data.data_dir, then {ENVIRONMENT}.")


@data_app.command("get", epilog="Example: fedveil data get mnist")
def data_get(
    name: Annotated[str, typer.Argument(help="Name of a data set.", autocompletion=data_set_names)], folder: DataDirectory = None
) -> None:
    """Find a data set on this machine, or download it, and check it; what to do by hand where neither works."""
    from fedveil.data.catalogue import CATALOGUE

    CATALOGUE.require(name)
    from fedveil.data.load import load, located

    loaded = load(name, folder)
    typer.echo(
        f"{name}: {len(loaded.x_train)} training and {len(loaded.x_test)} test examples, {located(name, folder)}; "
        f"source: {loaded.info.source}"
    )


@data_app.command("plot", epilog="Example: fedveil data plot my.toml --out partition.png")
def data_plot(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Image file to write.")] = Path("partition.png"),
    trust_plugins: TrustPlugins = False,
) -> None:
    """Plot how many examples of each label each client holds."""
    from fedveil.data.dataset import strata
    from fedveil.experiment.assembly import prepare
    from fedveil.experiment.resolve import data_spec
    from fedveil.report.figures import plot_partition

    ready = prepare(data_spec(configuration(config, preset, overrides, trust_plugins)))
    info = ready.dataset.info
    plot_partition(ready.partition, strata(info, ready.dataset.y_train), info.strata, out)
    typer.echo(f"partition plot: {out}")


commands = typer.Typer()

_OPTIONAL = {
    "train": ("torch", "training, attacks, figures, data sets"),
    "onnx": ("onnx", "export to ONNX"),
    "tensorboard": ("tensorboard", "live curves"),
    "mlflow": ("mlflow-skinny", "runs in MLflow"),
    "flower": ("flwr", "clients on machines of their own"),
    "metrics": ("prometheus-client", "numbers of a server or client for Prometheus"),
    "nvflare": ("nvflare", "noise in jobs of NVFlare"),
    "parquet": ("pyarrow", "tables in Parquet files"),
}
"""Extras of `pip install fedveil[...]`, each with its package and purpose."""


@commands.command(epilog="Example: fedveil doctor")
def doctor(
    sbom: Annotated[bool, typer.Option("--sbom", help="Print all installed packages as a CycloneDX bill of materials.")] = False,
) -> None:
    """Look at this machine: versions, cores, memory, GPU, disk, data sets, optional parts."""
    if sbom:
        from fedveil.cli.sbom import bill_of_materials

        print_json(bill_of_materials())
        return
    typer.echo("Importing PyTorch, looking for a GPU and data sets, timing the disk: some seconds ...", err=True)
    from fedveil import __version__
    from fedveil.data.catalogue import CATALOGUE
    from fedveil.data.load import ENVIRONMENT, located
    from fedveil.training.cores import available_cores

    cores = available_cores()
    pytorch, gpu = _pytorch()
    present = [name for name in CATALOGUE if located(name)] if pytorch else ["not looked for"]
    named = os.environ.get(ENVIRONMENT)
    print_table(
        [
            ("fedveil", f"{__version__} {pytorch or 'without PyTorch'}, Python {platform.python_version()}"),
            ("cores", f"{cores}; run.engine = 'auto' takes {'one worker process each' if cores > 1 else 'this process alone'}"),
            ("memory", _memory()),
            ("GPU", gpu),
            ("disk", f"{shutil.disk_usage('.').free / 1e9:.1f} GB free here; {_writing()}"),
            ("data", f"{ENVIRONMENT} is {named or 'not set'}; here: {', '.join(present)}; the others: fedveil data"),
            *((f"[{extra}]", _part(extra, package, use)) for extra, (package, use) in _OPTIONAL.items()),
            ("ssh-keygen", "found" if shutil.which("ssh-keygen") else "not found: fedveil sign needs it"),
        ]
    )


def _pytorch() -> tuple[str, str]:
    """Return PyTorch with its version, empty where it is not installed, and a description of the GPU."""
    try:
        import torch

        from fedveil.executors.device import gpu_problem
    except ModuleNotFoundError as error:
        return "", missing_extra(error)
    problem = gpu_problem()
    return f"with PyTorch {torch.__version__}", f"none ({problem})" if problem else torch.cuda.get_device_name(0)


def _memory() -> str:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        total, free = (int(lines[key].split()[0]) / 1e6 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return "unknown on this system"
    return f"{free:.1f} of {total:.1f} GB available"


def _writing() -> str:
    """Describe how long a small synced write takes, the least of three; each round has at least one."""
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
