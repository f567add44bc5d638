"""What a newcomer types first."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from typer.main import get_command
from typer.testing import CliRunner

import fedveil
from fedveil.cli.app import app, main
from fedveil.cli.command_options import configuration
from fedveil.errors import ConfigError
from fedveil.executors.interrupts import end_alike
from fedveil.experiment.config_files import load_config
from fedveil.experiment.run import run
from forked_program import ForkedProgram, command, forks
from kill_points import SERVER, kill_at

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SMALL = ["--set", "training.rounds=2", "--set", "run.engine=inline"]


def said(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(
        '[data]\nname = "digits"\npartition = { kind = "iid", clients = 10 }\n[model]\nname = "linear"\n'
        '[method]\nname = "dp-fedavg"\n'
        '[training]\nrounds = 2\nclients_per_round = 5\n[privacy]\nepsilon = 8.0\ndelta = 1e-3\n[run]\nengine = "inline"\n'
    )
    return path


def test_the_version() -> None:
    assert said("--version") == f"fedveil {fedveil.__version__}\n"


@pytest.mark.parametrize("command", [(), ("run",), ("data",), ("data", "get"), ("certify",)])
def test_help_in_short_and_flags_without_a_type(command: tuple[str, ...]) -> None:
    text = said(*command, "-h")
    assert text == said(*command, "--help")
    flags = [
        line for line in text.splitlines() if any(flag in line for flag in ("--quiet", "--json", "--trust-plugins", "--debug"))
    ]
    assert not any("<bool>" in line for line in flags)


def test_an_unknown_command_names_the_nearest_once() -> None:
    result = CliRunner().invoke(app, ["certfy"])
    assert result.exit_code == 2
    assert result.output.count("'certify'") == result.output.lower().count("did you mean") == 1


def test_run_without_a_file_says_how_to_begin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fedveil", "run"])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr().err
    assert stop.value.code == 2
    assert told.count("\n") == 1
    assert all(word in told for word in ("fedveil new NAME", "--preset NAME", "fedveil demo"))


@pytest.fixture
def no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data set is found but those that are embedded; others take seconds to look at."""
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    monkeypatch.setattr("fedveil.data.load.SYSTEM", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("no_data")
def test_data_says_where_each_lies() -> None:
    lines = {line.split()[0]: line for line in said("data").splitlines() if line}
    assert lines["digits"].endswith(": embedded")
    assert lines["mnist"].endswith(": downloaded when first used")
    assert lines["harbox"].endswith(": to be made by hand")
    assert "1437 training and 360 test examples, embedded" in said("data", "get", "digits")


@pytest.mark.usefixtures("no_data")
def test_doctor_says_at_once_what_takes_time_and_looks_at_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedveil.training.cores.available_cores", lambda: 7)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "\ncores          7; " in result.output
    assert "a ledger's write takes" in result.output
    assert result.output.splitlines()[0].startswith("Importing PyTorch")
    assert "Importing" not in result.stdout  # a pipe gets the table alone
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_data")
def test_doctor_in_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.NamedTemporaryFile", _refused)
    assert "nothing can be written here" in said("doctor")


def _refused(*args: object, **kwargs: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_names_complete() -> None:
    assert dir(fedveil) == sorted(fedveil.__all__)
    assert all(getattr(fedveil, name) is not None for name in fedveil.__all__)


PROGRAMS = [pytest.param("forked", marks=forks), pytest.param("started", marks=pytest.mark.slow)]
WRITTEN = {"summary.json", "report.html", "curves.png", "model.safetensors"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_reader_that_goes_away_ends_no_run(program: str, config: Path, tmp_path: Path) -> None:
    """`fedveil run ... | head -1`: everything is written all the same."""
    out = tmp_path / "r"
    if program == "forked":
        with ForkedProgram(command("run", config, "--out", out)) as running:
            assert running.output.read(1)
        assert running.status() == 0
    else:
        line = f"{sys.executable} -m fedveil run {config} --out {out} 2>&1 | head -c 1; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, len(done.stdout)) == (0, 1)
    assert {path.name for path in out.iterdir()} >= WRITTEN


@forks
def test_closed_descriptors_end_no_run(config: Path, tmp_path: Path) -> None:
    """`fedveil run ... >&- 2>&-`: no file of the run gets their numbers."""

    def act() -> None:
        for number in range(3):
            os.close(number)
        sys.stdout = sys.stderr = None
        try:
            command("run", config, "--out", tmp_path / "r")()
        finally:
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115

    with ForkedProgram(act) as running:
        assert running.status() == 0
    assert {path.name for path in (tmp_path / "r").iterdir()} >= WRITTEN


def test_what_an_encoding_lacks_is_a_question_mark(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning curve in the terminal is of blocks."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["fedveil", "run", str(config), "--quiet", "--out", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (None, 0)
    assert b"after 2 rounds   ??\n" in written.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
def test_output_for_which_there_is_no_room_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["fedveil", "certify", str(config)])
        with pytest.raises(SystemExit) as stop:
            main()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "fedveil: cannot read or write what this program prints: No space left on device\n"


def test_the_verdict_stands_before_training(config: Path, tmp_path: Path) -> None:
    """At a tiny epsilon nothing can be learned; the first line says so, and what would help."""
    text = said("run", str(config), "--out", str(tmp_path / "r"), "--set", "privacy.epsilon=0.1")
    assert text.startswith("Can it learn? Hardly")
    assert text.index("brings the ratio to 1") < text.index("Test accuracy")


def test_a_result_is_short_in_a_terminal_and_a_table_in_a_notebook(config: Path, tmp_path: Path) -> None:
    result = run(load_config(config), tmp_path / "[b]<i>")
    assert repr(result).startswith("<Result of dp-fedavg (proven): test accuracy ")
    assert "proven epsilon 8 at delta = 1e-3" in repr(result)
    assert len(repr(result)) < 400
    page = result._repr_html_()
    assert page.count("<tr>") == 1 + len(result.privacy.views)
    assert "<svg" in page
    assert "&lt;i&gt;" in page
    assert "<i>" not in page


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_interrupts_the_command(
    number: signal.Signals, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, after its second round was saved; nohup has a hang-up ignored, which the command leaves so."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here")
    monkeypatch.setattr(sys, "argv", ["fedveil", "run", str(config), "--out", str(tmp_path / "r"), "--set", "training.rounds=9"])
    kill_at(monkeypatch, SERVER["after the checkpoint"], {2}, lambda: signal.raise_signal(number))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 128 + number
    error = capsys.readouterr().err
    assert re.search(r"interrupted; 2 rounds are saved: fedveil run --resume \S+ goes on from there", error)
    assert "Traceback" not in error


@forks
def test_a_signal_ends_a_program_that_says_how_to_go_on(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    with ForkedProgram(command("run", config, "--out", out, "--quiet", "--set", "training.rounds=100000")) as program:
        while not has_rounds(out):
            assert program.running(), program.output.read()
            time.sleep(0.01)
        os.kill(program.pid, signal.SIGTERM)
        error = program.output.read()
        assert program.status() == 128 + signal.SIGTERM
    check_how_to_go_on(error)


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_ends_a_program_that_says_how_to_go_on(number: signal.Signals, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    line = [sys.executable, "-m", "fedveil", "run", str(config), "--out", str(out), "--set", "training.rounds=100000"]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as program:
        while not has_rounds(out):
            assert program.poll() is None
            time.sleep(0.05)
        program.send_signal(number)
        error = program.communicate(timeout=30)[1]
    assert program.returncode == 128 + number
    check_how_to_go_on(error)


def has_rounds(out: Path) -> bool:
    return (out / "history.csv").is_file() and len((out / "history.csv").read_text().splitlines()) >= 3


def check_how_to_go_on(error: str) -> None:
    assert re.search(r"interrupted; [0-9]+ rounds are saved: fedveil run --resume \S+ goes on from there", error)
    assert "Traceback" not in error


def test_a_hangup_that_is_ignored_stays_ignored(config: Path) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with end_alike():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("name", "hint"), [("fashion_mnist", " (did you mean 'fashion-mnist'?)"), ("zzz", "")])
def test_the_name_of_a_data_set_leads_to_data_get(name: str, hint: str) -> None:
    result = CliRunner().invoke(app, ["data", name])
    assert result.exit_code == 2
    assert f"fedveil data get NAME`{hint}" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.name='mnits'", r"data\.name = 'mnits'.*'mnist'"),
        ("method.name='dp-fedavgg'", r"method\.name = 'dp-fedavgg'.*'dp-fedavg'"),
        ("task.name='regresion'", r"task\.name = 'regresion'.*'regression'"),
    ],
)
def test_an_unknown_name_is_refused_before_anything_is_prepared(config: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configuration(config, None, [override], trust_plugins=False)
    (config.parent / "own.py").touch()
    with_plugin = [override, f"run.plugins=['{config.parent / 'own.py'}']"]  # which may bring the name
    configuration(config, None, with_plugin, trust_plugins=False)


@pytest.mark.parametrize(
    ("words", "begun", "whole"),
    [
        (["run", "--preset"], "noisy-fedavg/", "noisy-fedavg/"),
        (["methods"], "noisy-feda", "noisy-fedavg"),
        (["data", "get"], "fash", "fashion-mnist"),
        (["compare", "--methods"], "dp-fedavg:clip=0.3,banded", "dp-fedavg:clip=0.3,banded-mf"),
        (["run", "--set"], "training.lo", "training.local"),
        (["run", "--set"], "training.server_optimizer.m", "training.server_optimizer.momentum="),
        (["run", "--set"], "data.na", "data.name="),
        (["run", "--set"], "model.name=len", "model.name=lenet"),
        (["run", "--set"], "privacy.view=s", "privacy.view=server"),
        (["run", "--set"], "training.sampling=p", "training.sampling=poisson"),
        (["run", "--set"], "run.seeded_noise=t", "run.seeded_noise=true"),
    ],
)
def test_the_shell_completes_names(words: list[str], begun: str, whole: str) -> None:
    completing = ShellComplete(get_command(app), {}, "fedveil", "_FEDVEIL_COMPLETE")
    found = [item.value for item in completing.get_completions(words, begun)]
    assert found
    assert all(value.startswith(whole) for value in found)
    assert completing.get_completions(words, "no such name") == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["run", "--set", "privacy.view", "=", "ag"], ["aggregate"]),
        (["run", "--set", "data.partition.kind", "="], ["iid"]),
        (["compare", "--methods", "dp-fedavg", ":", "clip", "=", "0.3,banded"], ["0.3,banded-mf"]),
        (["methods", "noisy-fedp"], ["noisy-fedprox"]),
    ],
)
def test_bash_completes_words_that_it_breaks(
    typed: list[str], offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FEDVEIL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["fedveil", *typed]))
    monkeypatch.setenv("COMP_CWORD", str(len(typed)))
    monkeypatch.setattr(sys, "argv", ["fedveil"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (None, 0)
    assert capsys.readouterr().out.split()[: len(offered)] == offered
