"""Files of a run directory that hold what does not belong there: one line and status 2 (or 1: contradicted), no traceback."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from fedveil.cli.app import main
from fedveil.configuration.config import parse
from fedveil.run.run import run

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


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one command a text", "all"])
@pytest.mark.parametrize("name", FILES)
def test_every_command_says_it_in_a_line(
    name: str, every: bool, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    for i, text in enumerate(ODD):
        (tmp_path / "run" / name).write_text(text)
        for command in COMMANDS if every else (COMMANDS[(i + FILES.index(name)) % len(COMMANDS)],):
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
