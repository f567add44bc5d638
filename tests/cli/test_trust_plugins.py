"""No command runs the code that a run directory names, unless it is trusted and is the code of the run."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.experiment.config_files import check_plugins, load_config
from fedveil.experiment.plugins import load_plugins
from fedveil.experiment.run import run
from fedveil.methods.method_registry import METHODS

NAME = "stranger_method"
PLUGIN = """from pathlib import Path
from typing import Literal

from fedveil.methods.fedavg import DPFedAvg
from fedveil.methods.method_registry import register

Path(__file__).with_name("it-ran").touch()


@register
class Stranger(DPFedAvg):
    name: Literal["stranger"] = "stranger"
"""
CONFIG = """
data = {name = "digits", partition = {kind = "iid", clients = 8}}
model = {name = "linear"}
method = {name = "stranger", clip = 0.5}
training = {rounds = 1, clients_per_round = 4, sampling = "fixed", local_epochs = 1, batch_size = 64}
privacy = {epsilon = 6.0, delta = 1e-3}
run = {engine = "inline", plugins = ["stranger_method.py"]}
"""
COMMANDS: dict[str, Callable[[Path], Sequence[str]]] = {
    "audit of a run": lambda run: ["audit", f"{run}", "--n", "50"],
    "audit of its configuration": lambda run: ["audit", f"{run}/config.toml", "--n", "50"],
    "attack on a run": lambda run: ["attack", f"{run}", "--kind", "labels"],
    "attack on its configuration": lambda run: ["attack", f"{run}/config.toml", "--kind", "labels"],
    "certify": lambda run: ["certify", f"{run}/config.toml"],
    "replay": lambda run: ["replay", f"{run}/config.toml"],
    "twin": lambda run: ["twin", f"{run}/config.toml"],
    "resume": lambda run: ["run", "--resume", f"{run}"],
    "run": lambda run: ["run", f"{run}/config.toml"],
    "compare": lambda run: ["compare", f"{run}/config.toml", "--methods", "dp-fedavg"],
    "budget create": lambda run: [
        "budget",
        "create",
        f"{run.parent}/b",
        "--epsilon",
        "1",
        "--delta",
        "1e-5",
        "--like",
        f"{run}/config.toml",
    ],
    "data plot": lambda run: ["data", "plot", f"{run}/config.toml"],
}


def forget() -> None:
    """As in a new process."""
    sys.modules.pop(NAME, None)
    METHODS.pop("stranger", None)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory whose plugin has not been imported; `it-ran` appears in its parent when it is."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{NAME}.py").write_text(PLUGIN)
    (tmp_path / "own.toml").write_text(CONFIG)
    made = run(load_config(tmp_path / "own.toml"), tmp_path / "run").path
    (tmp_path / "it-ran").unlink()
    forget()
    yield made
    forget()


def call(arguments: Sequence[str]) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.heavy
def test_no_command_runs_them_unasked_or_at_another_digest(stranger: Path) -> None:
    plugin, summary = stranger.parent / f"{NAME}.py", stranger / "summary.json"
    for command, words in COMMANDS.items():
        plugin.write_text(PLUGIN)
        if command == "resume":
            summary = summary.rename(stranger.parent / "summary.json")
        arguments = words(stranger)
        refused = call(arguments)
        assert isinstance(refused.exception, ConfigError), (command, refused.output)
        shown = str(refused.exception)
        assert "--trust-plugins" in shown
        assert str(plugin) in shown
        assert hashlib.sha256(plugin.read_bytes()).hexdigest() in shown
        plugin.write_text(PLUGIN + "\n# changed\n")
        for flag in ([], ["--trust-plugins"]):
            changed = call([*arguments, *flag])
            assert isinstance(changed.exception, ConfigError), (command, changed.output)
            assert "not the code whose digest" in str(changed.exception)
        if command == "resume":
            summary = summary.rename(stranger / "summary.json")
        assert not (stranger.parent / "it-ran").exists(), command


@pytest.mark.few(1)
@pytest.mark.heavy
@pytest.mark.parametrize("command", ["audit of a run", "attack on a run", "certify"])
def test_trusted_at_the_recorded_digest_they_run(command: str, stranger: Path) -> None:
    done = call([*COMMANDS[command](stranger), "--trust-plugins"])
    assert done.exit_code == 0, done.output
    assert (stranger.parent / "it-ran").exists()


@pytest.mark.heavy
def test_reading_and_verifying_a_run_runs_none(stranger: Path) -> None:
    for arguments in (
        ["certify", f"{stranger}"],
        ["report", f"{stranger}"],
        ["ledger", f"{stranger}"],
        ["verify", f"{stranger}"],
    ):
        found = call(arguments)
        assert found.exit_code == (2 if arguments[0] == "verify" else 0), found.output
    assert re.search(r"statement made again: run\.plugins: .*--trust-plugins", found.output)
    assert not (stranger.parent / "it-ran").exists()
    trusted = call(["verify", f"{stranger}", "--trust-plugins"])
    assert trusted.exit_code == 0, trusted.output
    assert (stranger.parent / "it-ran").exists()


@pytest.mark.heavy
@pytest.mark.parametrize("gone", [["versions.json"], ["versions.json", "statement.json"]])
def test_a_run_that_records_no_digest_runs_none(gone: list[str], stranger: Path) -> None:
    for name in gone:
        (stranger / name).unlink()
    for flag in ([], ["--trust-plugins"]):
        refused = call(["certify", f"{stranger}/config.toml", *flag])
        assert isinstance(refused.exception, ConfigError)
        assert "which records the plugins' digests, cannot be read" in str(refused.exception)
    assert not (stranger.parent / "it-ran").exists()


@pytest.mark.heavy
def test_a_folder_with_a_configuration_alone_is_no_run(stranger: Path) -> None:
    bare = stranger.parent / "bare"
    bare.mkdir()
    (stranger / "config.toml").rename(bare / "config.toml")
    for command in ("audit of a run", "attack on a run"):
        refused = call([*COMMANDS[command](bare), "--trust-plugins"])
        assert refused.exit_code != 0
    assert not (stranger.parent / "it-ran").exists()


@pytest.mark.heavy
def test_ones_own_configuration_needs_no_flag(stranger: Path) -> None:
    done = call(["certify", f"{stranger.parent}/own.toml"])
    assert done.exit_code == 0, done.output
    assert (stranger.parent / "it-ran").exists()


def test_a_cached_file_is_not_run_in_the_place_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util
    import py_compile

    monkeypatch.setattr(sys, "path", list(sys.path))
    plugin, other = tmp_path / "cached_plugin.py", tmp_path / "other.py"
    plugin.write_text("code = 'of the source'\n")
    other.write_text("raise RuntimeError('the cached code ran')\n")
    cache = importlib.util.cache_from_source(str(plugin))
    py_compile.compile(str(other), cache, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    try:
        load_plugins([str(plugin)])
        assert sys.modules["cached_plugin"].__dict__["code"] == "of the source"
    finally:
        sys.modules.pop("cached_plugin", None)


def test_a_module_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_a_stranger"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it ran')\n")
    (package / "inner.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    name = "package_of_a_stranger.inner"
    digest = hashlib.sha256(b"").hexdigest()
    (tmp_path / "versions.json").write_text(f'{{"plugin {name}": "sha256 {digest}"}}')
    with pytest.raises(ConfigError, match=f"{digest}.*--trust-plugins"):
        check_plugins([name], tmp_path, trusted=False)
    check_plugins([name], tmp_path, trusted=True)
    for absent in ("package_of_a_stranger.absent", "no_such_module", "sys", ".", "a..b"):
        with pytest.raises(ConfigError, match="found no file"):
            check_plugins([absent], tmp_path, trusted=True)
