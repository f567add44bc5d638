"""The command-line program: its commands, its output streams, and the reporting of errors."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperGroup

from fedveil.cli import (
    budget_commands,
    ledger_commands,
    machine_commands,
    model_commands,
    privacy_commands,
    run_commands,
    study_commands,
    view_commands,
)
from fedveil.cli.command_help import Command, in_order, panel_of
from fedveil.cli.command_options import flag, whole_words
from fedveil.errors import ConfigError, FedveilError, missing_extra, one_line, plugin_fault
from fedveil.executors.interrupts import end_alike
from fedveil.registry import Registry


def broken_pipe_safe(stream: TextIO | None) -> TextIO:
    """Return a broken-pipe-safe version of the stream, which prints unencodable characters as `?`; None becomes /dev/null."""
    if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or stream.encoding.lower() != "utf-8"):
        stream.reconfigure(errors="replace")
    return cast(TextIO, _BrokenPipeSafe(stream or open(os.devnull, "w", encoding="utf-8")))


def standard_descriptors() -> None:
    """Open standard descriptors that were closed (`>&-`); otherwise the next opened file would receive their text."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


class _BrokenPipeSafe:
    """Stream that discards output once its reader is gone, as after `fedveil run ... | head -1`, so that the run goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write the text, or discard it if the reader is gone."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._discard()
            return len(text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "what this program prints") from None

    def flush(self) -> None:
        """Flush, or discard the buffer if the reader is gone."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()
        except OSError as error:
            raise OSError(error.errno, error.strerror, "what this program prints") from None

    def _discard(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


os.environ.setdefault("OMP_NUM_THREADS", "1")  # parallelism is by processes; threads inside operators would only slow it down


COMMANDS: Registry[Any] = Registry("command", "command", {})
"""Functions, and `typer.Typer`s of several commands, that papers, the deployment and other distributions register."""


def _unusable(error: ConfigError) -> Callable[[], None]:
    """Return a stand-in for a command that cannot be imported: it is listed with the others, and fails when it is called."""

    def command() -> None:
        raise error

    command.__doc__ = f"Cannot be used: {one_line(str(error))}"
    return command


class _Commands(TyperGroup):
    """Group of all commands; for an unknown one the nearest names are listed once, where typer and click would each list them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return in_order([*super().list_commands(ctx), *COMMANDS])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in COMMANDS:
            try:
                found = COMMANDS[cmd_name]
            except ConfigError as error:
                found = _unusable(error)
            if not isinstance(found, typer.Typer):
                single = typer.Typer(pretty_exceptions_enable=False)
                single.command(cmd_name, cls=Command)(found)
                found = single
            command = typer.main.get_command(found)
            command.name = cmd_name
        if command is not None:
            command.rich_help_panel = panel_of(cmd_name)  # type: ignore[attr-defined]
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if "Did you mean" in getattr(error, "message", "") and hasattr(error, "possibilities"):
                error.possibilities = None
            raise


app = typer.Typer(
    name="fedveil",
    cls=_Commands,
    help="Differentially private federated learning whose privacy you can check.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
GROUPS = (run_commands, model_commands, study_commands, privacy_commands, view_commands, machine_commands)
for group in GROUPS:
    for registered in group.commands.registered_commands:
        registered.cls = Command
    app.registered_commands.extend(group.commands.registered_commands)
app.add_typer(machine_commands.data_app, name="data")
app.add_typer(budget_commands.budget_app, name="budget")
app.add_typer(ledger_commands.ledger_app, name="ledger")


def _version(wanted: bool) -> None:
    if wanted:
        from fedveil import __version__

        typer.echo(f"fedveil {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, flag("--debug", "Show the traceback of an error.")] = False,
    version: Annotated[bool, flag("--version", "Print the version.", eager=_version)] = False,
) -> None:
    """Differentially private federated learning whose privacy you can check."""


def main() -> None:
    """Run the program; a user's error is one line on stderr and exit status 2."""
    standard_descriptors()
    sys.stdout, sys.stderr = broken_pipe_safe(sys.stdout), broken_pipe_safe(sys.stderr)
    with end_alike() as signals:
        try:
            _require_text(sys.argv[1:])
            with whole_words():
                app(prog_name="fedveil")
        except BaseException as error:
            if signals:  # the command has reported the interruption, unless another error followed
                if not isinstance(error, (KeyboardInterrupt, SystemExit)):
                    typer.echo(f"fedveil: interrupted; {one_line(str(error) or type(error).__name__)}", err=True)
                sys.exit(128 + signals[0])
            line = _in_a_line(error)
            if not line or "--debug" in sys.argv:
                raise
            typer.echo(f"fedveil: {one_line(line)}", err=True)
            sys.exit(2)


def _require_text(words: Sequence[str]) -> None:
    """Refuse an argument that cannot be the name of a file."""
    for word in words:
        if not any("\ud800" <= character <= "\udfff" for character in word):
            continue
        try:
            text = os.fsencode(word).decode("utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{os.fsencode(word)!r} is not text in UTF-8: rename the file, or give another name") from None
        raise ConfigError(f"{text!r}: this locale has ASCII only: set LC_ALL=C.UTF-8, or PYTHONUTF8=1")


def _in_a_line(error: BaseException) -> str:
    """Return a user's error as one line; empty for an internal fault of fedveil, and for an exit that a command requested."""
    if isinstance(error, FedveilError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return ""
    if lacking := missing_extra(error):
        return lacking
    if fault := plugin_fault(error):
        return f"{fault} (--debug shows how it came to that)"
    if _lacks_memory(error):
        return (
            f"too little memory ({str(error).strip() or type(error).__name__}): give this program more, or take a smaller table, "
            f"model or training.batch_size, or run.engine = 'inline' for fewer processes"
        )
    if isinstance(error, OSError):
        return f"cannot read or write {error.filename or 'a file'}: {error.strerror or error}"
    return ""


def _lacks_memory(error: BaseException) -> bool:
    """Return whether the error reports a lack of memory: from Python, numpy, torch, or the system's program loader."""
    words = ("allocate memory", "out of memory", "can't start new thread")
    reported = isinstance(error, (RuntimeError, ImportError, OSError)) and any(word in str(error) for word in words)
    return isinstance(error, MemoryError) or reported
