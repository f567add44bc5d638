"""Files that belong together: synced at once, named when all are on the disk, or none of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Barrier

import pytest

from fedveil.ledger.files import Drafts

NAMES = ("a", "b", "journal")


def write(folder: Path, text: bytes) -> None:
    with Drafts(private=True) as drafts:
        for name in NAMES[:2]:
            drafts.write(folder / name, [text])
        file = open(folder / NAMES[2], "ab")  # noqa: SIM115 (the drafts close it)
        drafts.sync_too(file)
        file.write(text)
        file.flush()
        drafts.sync()
        assert file.tell() == os.path.getsize(folder / NAMES[2])
        for name in NAMES[:2]:
            drafts.rename(folder / name)
    assert file.closed


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_are_synced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Barrier(len(NAMES), timeout=10)  # breaks where one waits for the others

    def sync(descriptor: int) -> None:
        together.wait()
        assert not {"a", "b"} & {path.name for path in tmp_path.iterdir()}

    monkeypatch.setattr(os, "fsync", sync)
    write(tmp_path, b"new")
    assert held(tmp_path) == dict.fromkeys(NAMES, b"new")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "b")} == {0o600}


@pytest.mark.skipif(sys.platform != "linux", reason="follows descriptors in /proc")
@pytest.mark.parametrize("name", ["a.part", "b.part", "journal"])
def test_where_one_is_not_on_the_disk_none_gets_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, b"old")

    def full(descriptor: int) -> None:
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) == name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write(tmp_path, b"new")
    assert held(tmp_path) == {"a": b"old", "b": b"old", "journal": b"oldnew"}
