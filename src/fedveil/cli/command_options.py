"""Options that several commands share, and how commands print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.models import OptionInfo

from fedveil.cli.completion import override_items, preset_names

if TYPE_CHECKING:
    from fedveil.configuration.config import Config


def flag(name: str, text: str, *, eager: Callable[[bool], None] | None = None) -> OptionInfo:
    """An option that is on or off, which `--help` shows without the type that typer would print beside it."""
    option: OptionInfo = typer.Option(name, help=text, metavar="", is_eager=eager is not None, callback=eager)
    return option


ConfigPath = Annotated[Path, typer.Argument(help="Configuration file (TOML).")]
OptionalConfig = Annotated[Path | None, typer.Argument(help="Configuration file (TOML); leave out with --preset.")]
Preset = Annotated[
    str | None,
    typer.Option(help="Ready configuration to use; `fedveil methods METHOD` lists them.", autocompletion=preset_names),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override section.key=value; may be repeated.", autocompletion=override_items),
]
AsJson = Annotated[bool, flag("--json", "Print JSON.")]
Seed = Annotated[int | None, typer.Option(help="Shorthand for --set run.seed=N.")]
Quiet = Annotated[bool, flag("--quiet", "No progress bar.")]
TrustPlugins = Annotated[
    bool, flag("--trust-plugins", "Run plugins that a run directory names, at the digests that it recorded.")
]
ForInstitution = Annotated[
    Literal["nist", "registry", "dpia", "model-card"] | None,
    typer.Option(
        "--as",
        help="Print what an institution asks for: answers to NIST SP 800-226, an entry for OpenDP's deployment registry (JSON), "
        "facts for a data protection impact assessment, or a model card.",
    ),
]
NewDirectory = Annotated[Path | None, typer.Option(help="Directory to write to; must be new or empty.")]


def with_seed(overrides: list[str] | None, seed: int | None) -> list[str]:
    """The overrides of `--set`, with that of `--seed`."""
    return [*(overrides or []), *([] if seed is None else [f"run.seed={seed}"])]


def configuration(config: Path | None, preset: str | None, overrides: list[str] | None, trust_plugins: bool) -> Config:
    """The configuration of a command, from a file or a preset; an unknown name in it is refused before torch is imported."""
    from fedveil.configuration.config import require_known_names
    from fedveil.configuration.config_files import load_config
    from fedveil.configuration.presets import chosen

    found = load_config(chosen(config, preset), overrides or [], trust_plugins=trust_plugins)
    require_known_names(found)
    return found


def import_trusted(target: Path, trust_plugins: bool) -> None:
    """Import the plugins of a run directory first, where the user trusts them."""
    if trust_plugins:
        from fedveil.configuration.config_files import import_recorded

        import_recorded(target)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(rows: list[tuple[str, str]]) -> None:
    """Print names, each with its text."""
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}")
