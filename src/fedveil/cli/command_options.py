"""Options that several commands share, shell completion, and printing."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from typer.models import OptionInfo

from fedveil.errors import ConfigError, one_line
from fedveil.experiment.given_paths import (
    require_configuration,
    require_exists,
    require_new,
    require_run,
)
from fedveil.experiment.presets import chosen, names, path_of

if TYPE_CHECKING:
    from fedveil.experiment.config import Config
    from fedveil.registry import Registry


def method_names(incomplete: str) -> list[str]:
    """Complete names of methods."""
    from fedveil.methods.method_registry import METHODS

    return _beginning(incomplete, METHODS)


def preset_names(incomplete: str) -> list[str]:
    """Complete names of presets."""
    return _beginning(incomplete, names())


def data_set_names(incomplete: str) -> list[str]:
    """Complete names of data sets."""
    from fedveil.data.catalogue import CATALOGUE

    return _beginning(incomplete, CATALOGUE)


def method_lists(incomplete: str) -> list[str]:
    """Complete the last name in a comma-separated list of methods."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in method_names(last)]


def override_items(incomplete: str) -> list[str]:
    """Complete `section.key=`; once the key is unique and its values have names, `section.key=value`."""
    from fedveil.experiment.config import Config, flat

    keys = [f"{key}=" for key in flat(Config().resolved()) if not key.startswith("method.") or key == "method.name"]
    fits = [key for key in keys if key.startswith(incomplete) or incomplete.startswith(key)]
    return _beginning(incomplete, [fits[0] + value for value in _values(fits[0][:-1])] or fits) if len(fits) == 1 else fits


def _values(key: str) -> list[str]:
    """Return the possible values of a configuration key, if these have names."""
    from fedveil.data.catalogue import CATALOGUE
    from fedveil.data.partition_options import PARTITIONS
    from fedveil.experiment.config import Config
    from fedveil.experiment.tracking import TRACKERS
    from fedveil.methods.method_registry import METHODS
    from fedveil.models.model_registry import MODELS
    from fedveil.tasks.task_registry import TASKS

    named: dict[str, Iterable[str]] = {"data.name": CATALOGUE, "data.partition.kind": PARTITIONS, "model.name": MODELS}
    named |= {"method.name": METHODS, "task.name": TASKS, "run.track": TRACKERS}
    if key in named:
        return list(named[key])
    kind: Any = Config
    for part in key.split("."):
        kind = kind.model_fields[part].annotation
    if kind is bool:
        return ["true", "false"]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(one.value) for one in kind]
    inside = (word for one in get_args(kind) for word in (get_args(one) or (one,)))  # also of an optional type
    return [word for word in inside if isinstance(word, str)]


@contextlib.contextmanager
def whole_words() -> Iterator[None]:
    """Adapt completion to bash, which splits words at `=` and `:`: join them, and print only what follows the last separator."""
    if os.environ.get("_FEDVEIL_COMPLETE") != "complete_bash":
        yield
        return
    words: list[str] = []
    for word in os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]:
        if words and (word[:1] in ("=", ":") or words[-1][-1:] in ("=", ":")):
            words[-1] += word
        else:
            words.append(word)
    os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    prefix = words[-1][: max(words[-1].rfind("="), words[-1].rfind(":")) + 1]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print("\n".join(line.removeprefix(prefix) for line in printed.getvalue().splitlines()))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def flag(name: str, text: str, *, eager: Callable[[bool], None] | None = None) -> OptionInfo:
    """Return an on-off option, without the type that typer would print in `--help`."""
    option: OptionInfo = typer.Option(name, help=text, metavar="", is_eager=eager is not None, callback=eager)
    return option


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a callback that checks the value of an argument or option, if there is one, before the command begins."""

    def callback(value: Any) -> Any:
        if value is not None:
            check(value)
        return value

    return callback


def _require_configuration_or_run(path: Path) -> None:
    require_exists(path, "{} is neither a configuration file nor a run directory")
    if path.is_dir():
        require_run(path)


def require_picture(path: Path) -> None:
    """Refuse a picture that cannot be written, as its drawing would."""
    from fedveil.drawing import writable

    writable(path)


def require_there(what: str) -> Callable[[Path], None]:
    """Return a check that something is at a path; `what` says what should be."""
    return lambda path: require_exists(path, f"{{}} is not {what}")


ConfigPath = Annotated[Path, typer.Argument(help="Configuration file (TOML).", callback=checked(require_configuration))]
OptionalConfig = Annotated[
    Path | None, typer.Argument(help="Configuration file (TOML); omit it with --preset.", callback=checked(require_configuration))
]
ConfigOrRun = Annotated[
    Path,
    typer.Argument(help="Configuration file (TOML) or run directory.", callback=checked(_require_configuration_or_run)),
]
OptionalConfigOrRun = Annotated[
    Path | None,
    typer.Argument(
        help="Configuration file (TOML) or run directory; omit it with --preset.", callback=checked(_require_configuration_or_run)
    ),
]
RunPath = Annotated[Path, typer.Argument(help="Run directory.", callback=checked(require_run))]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Ready configuration to use; `fedveil methods METHOD` lists them.",
        autocompletion=preset_names,
        callback=checked(path_of),
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override section.key=value; may be repeated.", autocompletion=override_items),
]
AsJson = Annotated[bool, flag("--json", "Print JSON.")]
Seed = Annotated[int | None, typer.Option(help="Shorthand for --set run.seed=N.")]
Epsilon = Annotated[float | None, typer.Option(help="Shorthand for --set privacy.epsilon=E.")]
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
DataDirectory = Annotated[
    Path | None,
    typer.Option("--data-dir", "--dir", help="Directory of data sets to look in first, as data.data_dir names it."),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Number of runs at a time; by default one per core.")]
NewDirectory = Annotated[
    Path | None, typer.Option(help="Directory to write to; must be new or empty.", callback=checked(require_new))
]


def with_shorthands(overrides: list[str] | None, seed: int | None = None, epsilon: float | None = None) -> list[str]:
    """Return the overrides of `--set`, plus those of `--seed` and `--epsilon`."""
    given = {"run.seed": seed, "privacy.epsilon": epsilon}
    return [*(overrides or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]


def configuration(config: Path | None, preset: str | None, overrides: list[str] | None, trust_plugins: bool) -> Config:
    """Load the configuration of a command, from a file or a preset; refuse unknown names before torch is imported."""
    file = chosen(config, preset)
    from fedveil.experiment.config import require_known_names
    from fedveil.experiment.config_files import load_config

    loaded = load_config(file, overrides or [], trust_plugins=trust_plugins)
    require_known_names(loaded)
    return loaded


def names_plugins(config: Path | None, overrides: list[str] | None) -> bool:
    """Return whether a configuration may name plugins; a path that is no file is refused when it is read."""
    written = config is not None and config.is_file() and b"plugins" in config.read_bytes()
    return written or any("plugins" in override for override in overrides or ())


def import_trusted(target: Path, trust_plugins: bool) -> None:
    """Import the plugins of a run directory, if the user trusts them."""
    if trust_plugins:
        from fedveil.experiment.config_files import import_recorded

        import_recorded(target)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_next(commands: Mapping[str, str]) -> None:
    """Print the commands that a user may want next, each with what it does."""
    width = max(map(len, commands))
    typer.echo("\nNext:")
    for command, purpose in commands.items():
        typer.echo(f"  {command:<{width}}  {purpose}")


def print_entries(registry: Registry[Any], text: Callable[[Any], str]) -> None:
    """Print the names of a registry, each with its text, or with why it cannot be used."""
    print_table([
        (name, f"cannot be used: {one_line(str(entry))}" if isinstance(entry, ConfigError) else text(entry))
        for name, entry in registry.tried()
    ])  # fmt: skip


def first_line(kind: Any) -> str:
    """Return the first line of an object's documentation."""
    return (kind.__doc__ or "").split("\n")[0]


def print_table(rows: list[tuple[str, str]]) -> None:
    """Print names, each with its text."""
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}")
