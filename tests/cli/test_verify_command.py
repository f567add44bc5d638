"""`fedveil verify`, and the commands and pages that show what it finds: outcomes, exit status, one line a finding."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.experiment.verification import headline, printable, problems
from fedveil.statement.statement_layout import from_dict
from fedveil.verify import Finding, Verification
from finished_runs import finished

pytestmark = pytest.mark.heavy
EARLIER = Path(__file__).parents[1] / "experiment" / "data" / "aggregate-0.1"


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory, tmp_path)


@pytest.fixture
def forged(run: Path) -> Path:
    """Every epsilon of the statement says 0.01."""
    values = json.loads((run / "statement.json").read_text())
    for numbers in values["views"]:
        numbers["proven"]["epsilon"] = 0.01
    (run / "statement.json").write_text(json.dumps(values))
    return run


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_a_run_of_today_is_verified_and_nothing_is_written(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = call("verify", run)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert re.fullmatch(rf"{run}: verified \(\d+ verified\)", lines[0])
    groups = [line for line in lines if line and not line.startswith(" ")][1:]
    assert groups == ["Verified", "What has to be trusted"]
    assert "  statement made again: configuration and data card give every number and every text of it" in lines
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert fv.verification(run).outcome == "verified"


def test_a_forged_statement_is_contradicted_in_each_command(forged: Path) -> None:
    done = call("verify", forged)
    assert done.exit_code == 1
    assert [line for line in done.output.splitlines() if line and not line.startswith(" ")][1] == "Contradicted"
    for flags in (["--markdown"], ["--json"]):
        shown = call("certify", forged, *flags)
        assert shown.exit_code == 1
        if "--json" not in flags:
            assert shown.output.index("contradicted: proven epsilon") < shown.output.index("rivacy statement")
    values = strict(shown.output)
    assert values["verification"]["outcome"] == "contradicted"
    assert from_dict(values).proven.epsilon == 0.01
    page = call("report", forged)
    assert page.exit_code == 0
    assert re.search(r"Contradicted: proven epsilon \(aggregate view\): expected .*found 0\.01", page.output)
    assert "Do not rely" in (forged / "report.html").read_text()


def test_json_is_strict_and_complete(run: Path) -> None:
    values = strict(call("verify", run, "--json").output)
    assert set(values) == {"run", "outcome", "closing_digest", "findings"}
    assert values["outcome"] == "verified"
    assert re.fullmatch("[0-9a-f]{64}", values["closing_digest"])
    assert {frozenset(finding) for finding in values["findings"]} == {frozenset({"kind", "subject", "text"})}
    pinned = call("verify", run, "--pin", values["closing_digest"])
    assert (pinned.exit_code, "pin: " in pinned.output) == (0, True)
    assert call("verify", run, "--pin", "0" * 64).exit_code == 1


def test_a_zip_is_verified_as_its_directory(run: Path, forged: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for folder, status in ((finished(tmp_path_factory, tmp_path_factory.mktemp("zip")), 0), (forged, 1)):
        archive = shutil.make_archive(str(folder), "zip", folder.parent, folder.name)
        done = call("verify", archive)
        assert done.exit_code == status, done.output
        assert "statement made again" in done.output


def test_what_is_no_run_cannot_be_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    (tmp_path / "text").write_text("no run")
    for path in (tmp_path / "empty.zip", tmp_path / "text", tmp_path, EARLIER):
        done = call("verify", path)
        assert done.exit_code == 2, done.output
        assert ": cannot tell (" in done.output


def test_earlier_runs_are_shown_as_what_cannot_be_told(tmp_path: Path) -> None:
    run = Path(shutil.copytree(EARLIER, tmp_path / "run"))
    shown = call("certify", run)
    assert (shown.exit_code, shown.output.splitlines()[0]) == (0, f"{run}: cannot tell (2 cannot tell)")
    assert "Verification: cannot tell." in call("report", run).output


def test_signers_and_identity_go_together(run: Path) -> None:
    for flags in (["--signers", "x"], ["--identity", "alice"]):
        refused = call("verify", run, *flags)
        assert isinstance(refused.exception, ConfigError)


def test_a_finding_is_one_line_whatever_a_stranger_calls_his_files(run: Path) -> None:
    (run / "x\nVerified\n  all: right\x1b[2J\u202e").touch()
    done = call("verify", run)
    assert r"x\nVerified\n  all: right\x1b[2J\u202e" in done.output
    assert printable("ε ≤ 1, [bold]é[/]") == "ε ≤ 1, [bold]é[/]"
    assert "\x1b" not in done.output


def test_headline_and_problems() -> None:
    found = Verification((Finding("trust", "a", "b"), Finding("unknown", "c", "d"), Finding("contradicted", "e", "f")))
    assert headline("run", found) == "run: contradicted (1 contradicted, 1 cannot tell)"
    assert problems(found) == ["contradicted: e: f", "cannot tell: c: d"]
