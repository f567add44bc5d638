"""The disk is full at each moment at which a command adds to a finished run: one line, and what was there stays."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.experiment.config import parse
from fedveil.experiment.run import run
from full_disk import FullDisk
from fuzzed_cases import Ended, contents, program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="follows descriptors in /proc")
ATTACKS = {
    "labels": "--kind labels --images 8 --batch 4 --defence none",
    "pictures": "--kind dlg --images 1 --steps 2 --restarts 1 --defence none",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round, and beside it a key of SSH where there is ssh-keygen."""
    folder = tmp_path_factory.mktemp("finished")
    sections = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 4}},
        "model": {"name": "linear"},
        "method": {"name": "dp-fedavg"},
        "training": {"rounds": 1, "clients_per_round": 4},
        "privacy": {"epsilon": 8.0, "delta": 1e-3, "view": "server"},
        "run": {"engine": "inline"},
    }
    run(parse(sections), folder / "run")
    if shutil.which("ssh-keygen"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    return folder


def at_every_point(words: tuple[object, ...], folder: Path, but: str = "") -> list[Ended]:
    """The command with no room at each point below `folder` in turn: nothing changes, nothing stays, and with room it works.

    but: the end of the name of a file that may be the new one, whole, where what is written after it failed.
    """

    def files() -> dict[str, str]:
        return {name: digest for name, digest in contents(folder).items() if not (but and name.endswith(but))}

    before, ends = files(), list[Ended]()
    while True:
        with FullDisk(folder, fails=len(ends)) as disk:
            done = program(*words)
        if len(disk.points) <= len(ends):
            assert (done.status, done.err) == (0, ""), done
            assert ends
            assert files() != before
            return ends
        point = disk.points[len(ends)]
        assert (done.status, done.fault()) == (2, ""), point
        assert "No space left on device" in done.err, point
        assert files() == before, point
        ends.append(done)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen: OpenSSH's client is not installed")
def test_signing(finished: Path, copied: Path) -> None:
    for done in at_every_point(("sign", copied, "--key", finished / "key"), copied.parent):
        assert f"cannot write {copied / 'closing.sig'}" in done.err
    assert program("verify", copied).status == 0


@pytest.mark.slow
def test_audits_say_what_they_found(copied: Path) -> None:
    for n in (40, 50):  # where there are none yet, and in the place of earlier ones
        for done in at_every_point(("audit", copied, "--n", n, "--json"), copied.parent):
            assert f"cannot write {copied / 'audits.json'}" in done.err
            assert "at least epsilon = " in done.err
    assert program("verify", copied).status == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ATTACKS)
def test_attacks_say_what_they_found(kind: str, copied: Path) -> None:
    words = ("attack", copied / "config.toml", *ATTACKS[kind].split(), "--json", "--out", copied.parent / "out", "--seed")
    assert program(*words, 0).status == 0  # whose record then stays until there is another
    for done in at_every_point((*words, 1), copied.parent, but=".png"):
        assert "Found: " in done.err
    pictures = list((copied.parent / "out").glob("*.png"))
    assert len(pictures) == (kind == "pictures")
    assert all(picture.read_bytes().endswith(b"IEND\xaeB`\x82") for picture in pictures)


@pytest.mark.parametrize(
    ("command", "out"), [("report", "report.html"), pytest.param("plot", "picture.svg", marks=pytest.mark.slow)]
)
def test_an_earlier_page_or_picture_stays(command: str, out: str, copied: Path) -> None:
    (copied / out).write_bytes(b"earlier")
    at_every_point((command, copied, "--out", copied / out), copied.parent)
    assert len((copied / out).read_bytes()) > 1000


@pytest.mark.slow
def test_a_comparison_drawn_again(finished: Path, tmp_path: Path) -> None:
    words = ("compare", finished / "run" / "config.toml", "--methods", "dp-fedavg", "--epsilon", 8, "--seeds", 1, "--jobs", 1)
    assert program(*words, "--out", tmp_path / "c").status == 0
    with FullDisk(tmp_path) as disk:
        assert program(*words, "--out", tmp_path / "c").status == 0
    before = contents(tmp_path)
    for number in range(0, len(disk.points), 5):
        with FullDisk(tmp_path, fails=number):
            done = program(*words, "--out", tmp_path / "c")
        assert (done.status, done.fault()) == (2, ""), disk.points[number]
        assert contents(tmp_path) == before, disk.points[number]
