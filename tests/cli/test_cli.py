"""The program as a person meets it: exit status, what it prints, what lies in the run directory."""

from __future__ import annotations

import csv
import json
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from safetensors.numpy import load_file

from fedveil.cli.app import main
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config_files import load_config
from fedveil.statement.institutions import Institution, for_institution

Program = Callable[..., subprocess.CompletedProcess[str]]

CONFIG = """
[data]
name = "digits"
partition = { kind = "dirichlet", clients = 12, alpha = 1.0 }
client_test_fraction = 0.2
[model]
name = "linear"
[method]
name = "dp-fedavg"
clip = 0.5
[training]
rounds = 3
clients_per_round = 6
[privacy]
epsilon = 6.0
delta = 1e-3
[run]
seed = 4
seeded_noise = true
engine = "inline"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    return path


def process(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedveil", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """The program called in this process, which has imported what takes seconds."""

    def called(*args: object) -> subprocess.CompletedProcess[str]:
        words = ["fedveil", *map(str, args)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        return subprocess.CompletedProcess(words, int(end.value.code or 0), *capsys.readouterr())

    return called


@pytest.mark.parametrize("started", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["called", "started"])
def test_run_leaves_a_complete_directory_and_the_same_seed_gives_the_same_bits(
    started: bool, config: Path, tmp_path: Path, call: Program
) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    done = (process if started else call)("run", config, "--out", first)
    assert done.returncode == 0, done.stderr
    assert "Test accuracy" in done.stdout
    assert str(first) in done.stdout.replace("\n", "")
    assert "simulation only" in done.stdout.replace("\n", " ")
    names = {p.relative_to(first).as_posix() for p in first.rglob("*")}
    assert names >= {
        *("config.toml", "versions.json", "statement.json", "statement.md", "ledger.sqlite", "history.csv"),
        *("layers.csv", "private/clients.csv", "summary.json", "model.safetensors", "curves.png"),
    }
    assert tomllib.loads((first / "config.toml").read_text())["run"]["seed"] == 4
    with (first / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [r["round"] for r in rows] == ["0", "1", "2"]
    assert {"test_loss", "test_accuracy", "test_precision", "test_recall", "test_f1", "noise_norm"} <= set(rows[0])
    assert "seconds" in (first / "private" / "history.csv").read_text().splitlines()[0]  # a Poisson round's time tells its size
    statement = json.loads((first / "statement.json").read_text())
    assert "inf" in json.dumps(statement)
    with sqlite3.connect(first / "ledger.sqlite") as book:
        assert book.execute("SELECT count(*), min(client) FROM release").fetchone() == (3, -1)
    assert call("run", config, "--out", second, "--quiet").returncode == 0
    a, b = (load_file(p / "model.safetensors") for p in (first, second))
    assert set(a) == set(b)
    assert all((a[k] == b[k]).all() for k in a)
    again = call("run", config, "--out", first)
    assert again.returncode == 2
    assert "not empty" in again.stderr
    shown = call("ledger", first, "--json")
    assert json.loads(shown.stdout)[0]["releases"] == 3


def test_errors_are_one_line_without_traceback_and_status_2(config: Path, tmp_path: Path, call: Program) -> None:
    for args in (
        ["run", config, "--set", "training.roundz=1"],
        ["run", config, "--set", "privacy.noise_multiplier=1.0"],
        ["run", config, "--set", "data.name=nothing"],
        ["certify", tmp_path / "absent.toml"],
        ["certify", config, "--set", "privacy.delta=0.5"],
        ["ledger", tmp_path],
    ):
        done = call(*args) if args[0] != "ledger" else process(*args)
        assert done.returncode == 2, args
        assert done.stderr.startswith("fedveil: ")
        assert len(done.stderr.strip().splitlines()) == 1
        assert "Traceback" not in done.stderr
    with pytest.raises(ConfigError, match="absent"):
        call("--debug", "certify", tmp_path / "absent.toml")


def test_certify_speaks_json_and_markdown(config: Path, call: Program) -> None:
    done = call("certify", config, "--json")
    assert done.returncode == 0
    views = json.dumps(json.loads(done.stdout))
    assert all(word in views for word in ("server", "aggregate", "final", "proven"))
    assert "epsilon" in call("certify", config, "--markdown").stdout


def test_certify_writes_what_institutions_ask_for(config: Path, call: Program) -> None:
    statement = certify_config(load_config(config))
    for institution in get_args(Institution):
        done = call("certify", config, "--as", institution)
        assert (done.returncode, done.stdout) == (0, for_institution(statement, institution))
    done = call("certify", config, "--as", "nist", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--as nist has a format of its own: omit --json and --markdown" in " ".join(done.stderr.split())


def test_no_model_card_is_written_of_a_contradicted_run(config: Path, tmp_path: Path, call: Program) -> None:
    run = tmp_path / "run"
    call("run", config, "--out", run, "--quiet", "--set", "run.seeded_noise=false")
    card = call("certify", run, "--as", "model-card")
    assert card.returncode == 0
    closing = json.loads(call("verify", run, "--json").stdout)["closing_digest"]
    accuracy = json.loads((run / "summary.json").read_text())["final"]["test_accuracy"]
    assert f"closing digest {closing}, " in card.stdout
    assert f"test_accuracy: {accuracy:.4g} " in card.stdout
    assert card.stdout.startswith("---\n")
    assert ": verified (" in card.stderr
    call("publish", run, tmp_path / "shown")
    assert call("certify", tmp_path / "shown", "--as", "model-card").stdout == card.stdout
    (run / "summary.json").write_text((run / "summary.json").read_text().replace("test_accuracy", "test_precision"))
    done = call("certify", run, "--as", "model-card")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no model-card is written for a contradicted run" in done.stderr


def test_lists(call: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))  # real data sets take seconds to look at
    for command, word in (("methods", "dp-fedavg"), ("models", "lenet5"), ("data", "fashion-mnist"), ("tasks", "survival")):
        done = call(command)
        assert done.returncode == 0
        assert word in done.stdout


def test_a_partition_is_plotted(config: Path, tmp_path: Path, call: Program) -> None:
    preset = ("--preset", "fedglp-adp/fashion-mnist", "--set", "data.name=digits")
    for given in ((config,), preset):
        done = call("data", "plot", *given, "--out", tmp_path / "p.png")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "p.png").unlink()


@pytest.mark.slow
def test_a_run_imports_what_draws_only_when_there_is_something_to_draw() -> None:
    heavy = "m for m in ('matplotlib', 'scipy.stats') if m in sys.modules"
    code = f"import sys, fedveil.cli.run_terminal; sys.exit(' '.join({heavy}) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
