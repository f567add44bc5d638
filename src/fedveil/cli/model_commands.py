"""Commands that use the model of a finished run: predict and export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.command_options import TrustPlugins, checked, import_trusted, require_there
from fedveil.experiment.given_paths import require_one_run, require_output

commands = typer.Typer()
FinishedRun = Annotated[Path, typer.Argument(help="Directory of a finished run.", callback=checked(require_one_run))]


@commands.command(epilog="Example: fedveil predict runs/first new-patients.csv --out scores.csv --copy patient_id")
def predict(
    run: FinishedRun,
    table: Annotated[
        Path,
        typer.Argument(
            help="New rows: a .csv, .tsv or .parquet file. It needs no target column.", callback=checked(require_there("a table"))
        ),
    ],
    out: Annotated[Path, typer.Option(help="CSV file to write.", callback=checked(require_output))] = Path("scores.csv"),
    copy: Annotated[list[str] | None, typer.Option(help="Column of the table to copy, such as an id; may be repeated.")] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Predict for the rows of a table, and write a CSV file with a row for each of them."""
    from fedveil.api.run import open_run

    import_trusted(run, trust_plugins)
    count = open_run(run).trained.write_predictions(table, out, tuple(copy or ()))
    typer.echo(f"predictions: {out} ({count:,} row{'s' * (count != 1)}, none left out; only you can read the file)")


@commands.command(epilog="Example: fedveil export runs/first --to model.onnx")
def export(
    run: FinishedRun,
    to: Annotated[
        Path,
        typer.Option(
            "--to", help="File to write: .pt is a state dict, .onnx a graph (fedveil[onnx]).", callback=checked(require_output)
        ),
    ],
    trust_plugins: TrustPlugins = False,
) -> None:
    """Write the model for other programs, as a state dict of PyTorch or in ONNX."""
    from fedveil.api.run import open_run

    import_trusted(run, trust_plugins)
    typer.echo(f"model: {open_run(run).export(to)}")
