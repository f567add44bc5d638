"""Files of a run directory that hold what does not belong there: one line and status 2 (or 1: contradicted), no traceback."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedveil.cli.app import main
from fedveil.errors import LedgerError
from fedveil.experiment.config import parse
from fedveil.experiment.run import run
from full_disk import FullDisk
from fuzzed_cases import program
from resumed_runs import case, go, interrupted

ODD = ['[1, "x"]', '{"a":', "null", "7", '{"counts": [[1], [1, 2]]}', '{"counts": [["x"]]}', '{"counts": [[1]], "format": 3}']
FILES = ["summary.json", "private/partition.json", "statement.json", "data.json", "versions.json"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    sections = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 4}},
        "model": {"name": "linear"},
        "method": {"name": "dp-fedavg"},
        "training": {"rounds": 1, "clients_per_round": 4},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "run": {"engine": "inline"},
    }
    run(parse(sections), folder)
    return folder


COMMANDS = ("report", "verify", "certify", "ledger", "plot")


@pytest.mark.few(2)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("name", FILES)
def test_every_command_says_it_in_a_line(
    name: str, every: bool, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    number = FILES.index(name)
    for i, text in list(enumerate(ODD))[0 if every else number % 2 :: 1 if every else 2]:
        (tmp_path / "run" / name).write_text(text)
        for command in COMMANDS if every else (COMMANDS[(i + number) % len(COMMANDS)],):
            monkeypatch.setattr(sys, "argv", ["fedveil", command, str(tmp_path / "run")])
            with pytest.raises(SystemExit) as stop:
                main()
            assert stop.value.code in (None, 0, 1, 2)
            assert (stop.value.code == 2) == (capsys.readouterr().err.count("\n") == 1)


@pytest.mark.parametrize(
    "setting", ["training.server_optimizer.lr=1e308", "privacy.noise_multiplier=1.7e308", "training.optimizer.lr=inf"]
)
def test_numbers_that_no_float_holds_are_refused(
    setting: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (finished / "config.toml").read_text()
    (tmp_path / "c.toml").write_text(config)
    monkeypatch.setattr(sys, "argv", ["fedveil", "run", str(tmp_path / "c.toml"), "--set", setting, "--out", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert setting.split("=")[0] in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe[data]", "is not valid TOML, which is text in UTF-8"),
        (b'[data]\n"a\\n\\u001b[31m" = 1', "data.a\\n\\x1b[31m = 1: unknown key"),
        (b'[data]\nname = "' + b"x" * 100_000 + b'"', " ... "),
        (b"[public]\ndata = [[]]", "public.data"),
        (b"[model]\ntrainable = 1", "model.trainable"),
        (b"a = " + b"[" * 100_000, "is not valid TOML: it is nested too deep"),
        (b'[data.source]\nfile = "C:\\Users\\new.csv"', "in double quotes a backslash begins an escape: write paths in single"),
        (
            b'[data.source]\nfile = "C:\\new.csv"\ntarget = "y"\nfeatures = ["a"]',
            "in double quotes TOML reads a backslash",
        ),
        (b'[task]\nname = "survival"', "task.name = 'survival' learns (time, event), and the targets of digits are 10 classes"),
        (b'[run]\nplugins = ["~nobody-of-that-name/a.py"]', "~nobody-of-that-name/a.py: Could not determine home directory"),
        (b"a = " + b"{a = " * 100_000, "is not valid TOML: it is nested too deep"),
        (b"a" + b".a" * 2_000 + b" = 1", "a = (nested too deep to be shown): unknown key"),
        (b"[training]\nrounds = " + b"9" * 5_000, "is not valid TOML: Exceeds the limit"),
    ],
)
def test_an_odd_configuration_is_a_readable_line(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    done = program("certify", tmp_path / "c.toml")
    assert (done.status, done.fault()) == (2, "")
    assert words in done.err
    assert len(done.err) < 2100


def test_survival_on_classes_is_refused_by_commands_that_load_the_data(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[task]\nname = "survival"\n[model]\nname = "linear"\n')
    for words in (("run", tmp_path / "c.toml", "--out", tmp_path / "r"), ("data", "plot", tmp_path / "c.toml")):
        done = program(*words)
        assert (done.status, done.fault()) == (2, "")
        assert "task.name = 'survival' learns (time, event), and the targets of digits are 10 classes" in done.err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        np._core._exceptions._ArrayMemoryError((2**40,), np.dtype(float)),  # type: ignore[attr-defined]
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object: Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_a_readable_line(error: Exception, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fedveil.experiment.certify.certify", exhausted)
    done = program("certify", finished / "config.toml")
    assert (done.status, done.fault()) == (2, "")
    assert done.err.startswith("fedveil: too little memory (")


@pytest.mark.slow
@pytest.mark.heavy
def test_a_locale_without_our_characters_ends_no_run(finished: Path, tmp_path: Path) -> None:
    """They become question marks on the screen; files are in UTF-8."""
    poor = {name: value for name, value in os.environ.items() if name not in ("LANG", "PYTHONIOENCODING")}
    poor |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "c.toml").write_text((finished / "config.toml").read_text())
    for words in (("run", "c.toml", "--out", "r"), ("verify", "r"), ("report", "r")):
        command = [sys.executable, "-m", "fedveil", *words]
        done = subprocess.run(command, cwd=tmp_path, env=poor, capture_output=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "fedveil", "certify", "Hôpital.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=poor, capture_output=True, check=False, timeout=200)
    assert done.returncode == 2
    assert done.stderr.startswith(b"fedveil: ")
    assert b"this locale has ASCII only: set LC_ALL=C.UTF-8" in done.stderr


def test_a_configuration_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "c.toml").symlink_to("/dev/zero")
    done = program("certify", tmp_path / "c.toml")
    assert (done.status, done.fault()) == (2, "")
    assert "larger than 16 MiB" in done.err


def test_a_byte_order_mark_is_no_part_of_a_configuration(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\xef\xbb\xbf" + (finished / "config.toml").read_bytes())
    assert program("certify", tmp_path / "c.toml").status == 0


@pytest.mark.parametrize("text", ["[" * 20_000, "9" * 5_000])
def test_odd_values_of_overrides_are_a_readable_line(text: str, finished: Path) -> None:
    done = program("certify", finished / "config.toml", "--set", f"method.clip={text}")
    assert (done.status, done.fault()) == (2, "")
    assert done.err.startswith("fedveil: method.clip = '")
    done = program("tune", finished / "config.toml", "--on", "mnist", "--try", f"method.clip={text}")
    assert (done.status, done.fault()) == (2, "")
    assert "write section.key=[value, value]" in done.err


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("history.csv", "round", "rnd"),
        ("private/history.csv", "round", "rnd"),
        ("layers.csv", "layer,", "lyr,"),
        ("history.csv", "\n0", "\n" + "9" * 200_000),
        ("config.toml", "rounds = 1", "rounds = " + "9" * 5_000),
        ("config.toml", "rounds = 1", "rounds = " + "[" * 5_000),
    ],
)
def test_a_report_names_the_table_that_it_cannot_read(name: str, old: str, new: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    done = program("report", tmp_path / "run")
    assert (done.status, done.fault()) == (2, "")
    assert name in done.err


def test_a_pipe_in_the_place_of_a_ledgers_head_is_not_waited_for(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "ledger.sqlite-head").unlink()
    os.mkfifo(tmp_path / "run" / "ledger.sqlite-head")
    done = program("ledger", tmp_path / "run")
    assert (done.status, done.fault()) == (2, "")
    assert "ledger.sqlite-head is damaged" in done.err


def test_a_name_that_is_no_text_is_refused_and_a_folder_of_such_a_name_is_read(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    shutil.copytree(finished, folder / "run")
    for words in (("verify", folder / "run"), ("run", finished / "config.toml", "--out", folder / "new")):
        done = program(*words)
        assert (done.status, done.fault()) == (2, "")
        assert "\\xff" in done.err
        assert "is not text in UTF-8" in done.err
    assert [path.name for path in folder.iterdir()] == ["run"]
    monkeypatch.chdir(folder)
    for command in COMMANDS:
        assert program(command, "run").status == 0


def test_rounds_and_places_that_are_out_of_the_way(finished: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text((finished / "config.toml").read_text().replace("rounds = 1", "rounds = 9223372036854775807"))
    done = program("certify", config)
    assert (done.status, done.fault()) in ((0, ""), (2, ""))
    place = tmp_path / "a[" / "b]"
    done = program("run", finished / "config.toml", "--quiet", "--out", place)
    assert (done.status, done.err) == (0, "")
    assert str(place) in done.out
    assert (place / "report.html").is_file()


def test_a_run_is_not_resumed_on_files_that_are_not_its_own(tmp_path: Path) -> None:
    configuration = case("dp-fedavg aggregate", training={"rounds": 3})
    interrupted(configuration, tmp_path / "r", 2)
    (tmp_path / "r" / "statement.json").write_text("[" * 3000)
    before = (tmp_path / "r" / "ledger.sqlite").read_bytes()
    with pytest.raises(LedgerError, match=r"statement.json changed or gone since its start.*put back"):
        go(configuration, tmp_path / "r", resume=True)
    assert (tmp_path / "r" / "ledger.sqlite").read_bytes() == before


@pytest.mark.few(1)
@pytest.mark.parametrize("file", ["curves.png", "report.html"])
def test_a_run_whose_pictures_have_no_room_is_complete(file: str, finished: Path, tmp_path: Path) -> None:
    with FullDisk(tmp_path / "calm") as disk:
        program("run", finished / "config.toml", "--quiet", "--out", tmp_path / "calm")
    number = next(i for i, point in enumerate(disk.points) if point == f"write {file}.part")
    with FullDisk(tmp_path / "full", fails=number):
        done = program("run", finished / "config.toml", "--quiet", "--out", tmp_path / "full")
    assert (done.status, done.err) == (0, "")
    assert "Without curves and report" in done.out
    assert "No space left on device" in done.out
    assert "it proves later that nothing was changed" in done.out
    assert program("verify", tmp_path / "full").status == 0


def test_a_copy_for_which_there_is_no_room_leaves_nothing(finished: Path, tmp_path: Path) -> None:
    with FullDisk(tmp_path) as disk:
        assert program("publish", finished, tmp_path / "copy").status == 0
    shutil.rmtree(tmp_path / "copy")
    for number in range(0, len(disk.points), 3):
        with FullDisk(tmp_path, fails=number):
            done = program("publish", finished, tmp_path / "copy")
        assert (done.status, done.fault()) == (2, ""), disk.points[number]
        assert list(tmp_path.iterdir()) == []
