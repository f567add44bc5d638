"""Runs in zips, and directories with links: nothing is read from elsewhere, and nothing is unpacked without bound."""

from __future__ import annotations

import os
import shutil
import stat
import warnings
import zipfile
from pathlib import Path

import pytest

from fedveil.experiment import verification as unpacked_run
from fedveil.experiment.verification import verification
from verified_runs import made

pytestmark = pytest.mark.heavy


def reason(path: Path) -> str:
    """Why nothing can be said of a run; there is one line and no other."""
    (finding,) = verification(path).findings
    assert finding.kind == "unknown"
    assert "\n" not in finding.text
    return finding.text


def test_a_zip_of_a_run_verifies_and_is_unpacked_once(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "run"), "zip", made(tmp_path_factory, "server")))
    times = []
    whole = zipfile.ZipFile.extractall
    monkeypatch.setattr(zipfile.ZipFile, "extractall", lambda self, *more: times.append(1) or whole(self, *more))
    assert verification(archive).exit_status == 0
    assert times == [1]
    (tmp_path / "broken.zip").write_bytes(archive.read_bytes()[:-30])
    assert "neither a run directory nor a zip" in reason(tmp_path / "broken.zip")
    assert "neither a run directory nor a zip" in reason(tmp_path / "nothing")


def test_a_zip_over_the_limit_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked_run, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(zipfile.ZipFile, "extractall", lambda *_: pytest.fail("was unpacked"))
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ledger.sqlite", b"\0" * 2_000_000)
    assert bomb.stat().st_size < 10_000
    assert "would unpack to 2,000,000 bytes in 1 files, and at most 1,000,000 bytes" in reason(bomb)
    monkeypatch.setattr(unpacked_run, "MOST_FILES", 3)
    with zipfile.ZipFile(bomb, "w") as archive:
        for number in range(4):
            archive.writestr(str(number), "")
    assert "in 4 files" in reason(bomb)


@pytest.mark.parametrize("name", ["../ledger.sqlite", "/tmp/ledger.sqlite", "a/../../x", "..\\x", "C:x"])
def test_names_that_lead_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr(name, "x")
    assert "a path out of its folder: nothing was unpacked" in reason(tmp_path / "run.zip")


@pytest.mark.parametrize("names", [("statement.json", "statement.json"), ("statement.json", "Statement.JSON"), ("a", "./a")])
def test_two_files_of_one_name_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive, warnings.catch_warnings(action="ignore"):
        for name in names:
            archive.writestr(name, "x")
    assert "twice: nothing was unpacked" in reason(tmp_path / "run.zip")


def test_links_in_a_zip_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("statement.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert "a link" in reason(tmp_path / "run.zip")


@pytest.mark.parametrize("ledgers", [0, 2])
def test_a_zip_holds_one_run(ledgers: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr("notes.txt", "")
        for number in range(ledgers):
            archive.writestr(f"{number}/ledger.sqlite", "")
    assert f"holds {ledgers} ledgers" in reason(tmp_path / "run.zip")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["link", "pipe", "link to a folder", "endless device"])
@pytest.mark.parametrize("name", ["statement.json", "versions.json", "closing.sig", "private/history.csv", "more"])
def test_links_and_pipes_are_named_and_not_read(
    what: str, name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made(tmp_path_factory, "server"), run)
    (run / name).unlink(missing_ok=True)
    targets = {"link": made(tmp_path_factory, "server") / name, "link to a folder": tmp_path, "endless device": Path("/dev/zero")}
    if what == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(targets[what])
    assert f"links, pipes or devices ({name})" in reason(run)


def test_a_ledger_s_neighbours_by_name_are_named_as_not_covered(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path / "run"
    shutil.copytree(made(tmp_path_factory, "server"), run)
    (run / "ledger.sqlite-report.html").write_text("epsilon = 0.01")
    (found,) = (f for f in verification(run).findings if f.subject == "other files")
    assert "ledger.sqlite-report.html" in found.text


def test_deep_nesting_is_a_finding_and_no_traceback(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path / "run"
    shutil.copytree(made(tmp_path_factory, "server"), run)
    (run / "data.json").write_text("[" * 200_000)
    assert verification(run).exit_status == 1
