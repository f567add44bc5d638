"""One process at a time in a run directory, and the ledger that a checkpoint knew."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from fedveil.errors import ConfigError, LedgerError
from fedveil.experiment.run_directory import locked
from resumed_runs import case, entries, go, interrupted


def held_by_a_child(path: Path, *, with_a_grandchild: bool = False) -> tuple[int, int]:
    """A forked process that claims `path` and waits for its end, and perhaps one forked from it that outlives it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with locked(path):
                grandchild = os.fork() if with_a_grandchild else 0
                if grandchild or not with_a_grandchild:
                    os.write(writing, b"%d" % grandchild)
                time.sleep(600)
        finally:
            os._exit(1)
    grandchild = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    return child, grandchild


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    configuration, path = case("dp-fedavg aggregate", training={"rounds": 3}), tmp_path / "a"
    interrupted(configuration, path, 2)
    child, _ = held_by_a_child(path)
    before = sorted(p.name for p in path.iterdir())
    with pytest.raises(ConfigError, match="another run is at work in"):
        go(configuration, path, resume=True)
    assert sorted(p.name for p in path.iterdir()) == before
    assert len(entries(path)) == 2
    kill(child)
    os.waitpid(child, 0)
    assert len(go(configuration, path, resume=True).history) == 3


def test_only_the_run_itself_holds_the_lock_not_what_it_forked(tmp_path: Path) -> None:
    child, grandchild = held_by_a_child(tmp_path, with_a_grandchild=True)
    with pytest.raises(ConfigError, match="another run"), locked(tmp_path):
        pass
    kill(child)
    os.waitpid(child, 0)
    try:
        with locked(tmp_path):
            os.kill(grandchild, 0)  # is still there
    finally:
        kill(grandchild)


def test_the_same_process_is_refused_too_and_a_fork_does_not_end_the_claim(tmp_path: Path) -> None:
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(ConfigError, match="another run"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_of_two_new_runs_in_one_directory_the_second_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    child, _ = held_by_a_child(path)
    with pytest.raises(ConfigError, match="another run is at work in"):
        go(case("dp-fedavg aggregate"), path)
    assert list(path.iterdir()) == []
    kill(child)
    os.waitpid(child, 0)


LEDGER = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-head")


def copied(source: Path, target: Path) -> None:
    """Put another ledger in place, all its files."""
    target.mkdir(exist_ok=True)
    for name in LEDGER:
        (target / name).unlink(missing_ok=True)
        if (source / name).exists():
            shutil.copy(source / name, target / name)


def kept(path: Path) -> dict[Path, bytes]:
    """All files but the ledger's own: opening one moves into it what its log holds."""
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and not p.name.startswith("ledger")}


@pytest.mark.parametrize("name", ["dp-fedavg aggregate", "dp-fedavg server"])
def test_an_older_ledger_is_refused_and_a_newer_one_is_counted(name: str, tmp_path: Path) -> None:
    configuration, path = case(name, training={"rounds": 4}), tmp_path / "a"
    interrupted(configuration, path, 2)
    copied(path, tmp_path / "old")
    with pytest.MonkeyPatch.context() as patch:
        import fedveil.experiment.run as module

        real = module.Checkpoints.begin

        def save(self: module.Checkpoints, progress: module.Progress) -> None:
            real(self, progress)
            if progress.round == 3:
                raise KeyboardInterrupt

        patch.setattr(module.Checkpoints, "begin", save)
        with pytest.raises(KeyboardInterrupt):
            go(configuration, path, resume=True)
    copied(path, tmp_path / "new")
    copied(tmp_path / "old", path)
    before = kept(path)
    releases = 4 if "server" in name else 1
    with pytest.raises(
        LedgerError, match=rf"behind its checkpoint: it holds {2 * releases} releases, and release {3 * releases}, "
    ):
        go(configuration, path, resume=True)
    assert kept(path) == before
    for file in LEDGER:
        (path / file).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="holds no run"):
        go(configuration, path, resume=True)
    copied(tmp_path / "new", path)
    go(configuration, path, resume=True)
    assert len(entries(path)) == 4 * releases


def test_a_ledger_with_other_releases_is_refused_however_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = case("dp-fedavg aggregate", training={"rounds": 3})
    interrupted(configuration, tmp_path / "a", 2)
    go(configuration, tmp_path / "b")
    copied(tmp_path / "b", tmp_path / "a")
    with pytest.raises(LedgerError, match="is not as the run left it"):
        go(configuration, tmp_path / "a", resume=True)
    monkeypatch.setattr("fedveil.experiment.run.check_opening", lambda path: None)  # a ledger that opened beside the same files
    with pytest.raises(LedgerError, match="behind its checkpoint: it holds 3 releases, and release 1, "):
        go(configuration, tmp_path / "a", resume=True)
