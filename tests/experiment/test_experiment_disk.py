"""Full disks and places that may not be written: one clear error, and nothing that was saved is lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.config import Config
from resumed_runs import case, go, interrupted, same_end

BIG = {"model": {"hidden": [512]}}  # 38,000 parameters: checkpoints larger than the ledger


Calm = Callable[[Config], Path]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The directory of a run of the configuration that nothing disturbs."""
    made: dict[str, Path] = {}

    def run_of(configuration: Config) -> Path:
        if repr(configuration) not in made:
            made[repr(configuration)] = tmp_path_factory.mktemp("calm") / "run"
            go(configuration, made[repr(configuration)])
        return made[repr(configuration)]

    return run_of


def in_a_child(work: Callable[[], object]) -> str:
    """What a forked process raised, as `Class: message`, or an empty string."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work()
            answer = ""
        except FedveilError as error:
            answer = f"{type(error).__name__}: {error}"
        except BaseException:
            answer = "unexpected " + traceback.format_exc()
        finally:
            os.write(writing, answer.encode()[:60000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "kilobytes"),
    [("dp-fedavg aggregate", (20, 60, 200)), ("aldp-fl published", (250,))],
)
def test_files_that_may_not_grow_further(name: str, kilobytes: tuple[int, ...], calm: Calm, tmp_path: Path) -> None:
    """The system's limit on the size of a file stands for a full disk: every write beyond it fails for real, in all processes."""
    configuration = case(name, training={"rounds": 3}, **BIG)
    for limit in kilobytes:
        path = tmp_path / str(limit)

        def cramped(path: Path = path, limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit * 1024, resource.RLIM_INFINITY))
            go(configuration, path)

        answer = in_a_child(cramped)
        assert answer.startswith(("FedveilError: cannot save round", "LedgerError: cannot", "ConfigError: cannot write")), answer
        assert any(word in answer for word in ("make room", "free space", "writable folder", "choose another")), answer
        if (path / "ledger.sqlite").exists():
            go(configuration, path, resume=True)
            same_end(path, calm(configuration))


STATES = {"states-3.safetensors", "global-3.safetensors", "head.json"}


@pytest.mark.few(2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
@pytest.mark.parametrize(
    "file",
    [
        *("history.csv", "private/history.csv", "private/layers.csv", "private/summary.json"),
        *("model.safetensors", "summary.json"),
        *(f"checkpoint/{name}" for name in sorted(STATES)),
    ],
)
def test_a_device_that_is_full_at_each_file(file: str, calm: Calm, tmp_path: Path) -> None:
    configuration, path = case("aldp-fl published", training={"rounds": 4}), tmp_path / "a"
    configuration = configuration.model_copy(update={"run": configuration.run.model_copy(update={"engine": "inline"})})
    interrupted(configuration, path, 3)
    (path / f"{file}.part").symlink_to("/dev/full")
    with pytest.raises(FedveilError, match=r"cannot (write|save) .*No space left on device.*safe"):
        go(configuration, path, resume=True)
    assert Path("/dev/full").is_char_device()
    go(configuration, path, resume=True)
    same_end(path, calm(configuration))


def test_a_table_that_cannot_be_added_to(calm: Calm, tmp_path: Path) -> None:
    configuration, path = case("dp-fedavg aggregate", training={"rounds": 4}), tmp_path / "a"
    hit = []

    def block(record: Any) -> None:
        if record["round"] == 1:
            hit.append(1)
            (path / "history.csv").unlink()
            (path / "history.csv").mkdir()

    from federation_runs import prepared, small_digits
    from fedveil.experiment.run import run

    with pytest.raises(FedveilError, match=r"cannot write .*history.csv.*all finished rounds are safe .*checkpoint.*resume=True"):
        run(configuration, path, block, data=small_digits(), partition=prepared(configuration).partition)
    assert hit == [1]
    (path / "history.csv").rmdir()
    go(configuration, path, resume=True)
    same_end(path, calm(configuration))


def bare_namespace() -> bool:
    """Whether a tiny file system can be mounted without privileges."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


SCRIPT = """
import sys
sys.path.insert(0, {support!r})
from pathlib import Path
from resumed_runs import case, go
from fedveil.errors import FedveilError
configuration = case({name!r}, training={{"rounds": 3}}, model={{"hidden": [512]}})
try:
    go(configuration, Path({path!r}))
except FedveilError as error:
    print(type(error).__name__, error)
import shutil
shutil.copytree({path!r}, {kept!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [100, 400, 550, 650, 700])
def test_a_tiny_disk(kilobytes: int, calm: Calm, tmp_path: Path) -> None:
    """A file system of so many kilobytes, of which the run needs more; what is on it is then resumed on a large one."""
    if not bare_namespace():
        pytest.skip("needs unprivileged user namespaces to mount a tiny file system")
    configuration = case("dp-fedavg aggregate", training={"rounds": 3}, **BIG)
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    support = str(Path(__file__).parents[1] / "support")
    script = SCRIPT.format(support=support, name="dp-fedavg aggregate", path=str(disk / "run"), kept=str(kept))
    command = f"mount -t tmpfs -o size={kilobytes}k none {disk} && exec {sys.executable} -c '{script.replace(chr(39), chr(34))}'"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("FedveilError cannot", "LedgerError cannot", "ConfigError cannot")), done.stdout
    if (kept / "ledger.sqlite").exists():
        go(configuration, kept, resume=True)
        same_end(kept, calm(configuration))


# --- permissions ------------------------------------------------------------------------------------------------------

NOBODY = 65534


@pytest.fixture
def plain_folder() -> Iterator[Path]:
    """A folder that any user may enter: root ignores permissions, so as root these tests go on as another user."""
    folder = Path(tempfile.mkdtemp(prefix="fedveil-"))
    folder.chmod(0o777)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o777)
    shutil.rmtree(folder)


def as_plain_user(work: Callable[[], object]) -> str:
    def demoted() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()

    return in_a_child(demoted)


def given_away(path: Path, files: int, folders: int) -> None:
    """Set the permissions of everything below `path`, and its owner where we may."""
    for each in [path, *path.rglob("*")]:
        if os.geteuid() == 0:
            os.chown(each, NOBODY, NOBODY)
        each.chmod(folders if each.is_dir() else files)


@pytest.mark.parametrize("what", ["everything", "folders", "checkpoint", "ledger"])
def test_a_read_only_run_directory(what: str, plain_folder: Path, calm: Calm) -> None:
    configuration: Config = case("dp-fedavg aggregate", training={"rounds": 4})
    path = plain_folder / "run"
    interrupted(configuration, path, 3)
    given_away(path, 0o644, 0o755)
    if what == "everything":
        given_away(path, 0o444, 0o555)
    elif what == "folders":
        given_away(path, 0o644, 0o555)
    elif what == "checkpoint":
        (path / "checkpoint").chmod(0o555)
    else:
        (path / "ledger.sqlite").chmod(0o444)
    answer = as_plain_user(lambda: go(configuration, path, resume=True))
    assert answer.startswith(("FedveilError: cannot", "LedgerError: cannot")), answer
    assert any(word in answer for word in ("permission", "Permission", "readonly")), answer
    given_away(path, 0o644, 0o755)
    assert as_plain_user(lambda: go(configuration, path, resume=True)) == ""
    same_end(path, calm(configuration))


def test_a_place_where_no_run_may_begin(plain_folder: Path) -> None:
    plain_folder.chmod(0o555)
    answer = as_plain_user(lambda: go(case("dp-fedavg aggregate"), plain_folder / "run"))
    assert answer.startswith("ConfigError: cannot write the run directory"), answer
    assert "Permission denied; choose another --out" in answer
    with pytest.raises(ConfigError, match="cannot write the run directory"):
        go(case("dp-fedavg aggregate"), Path("/dev/null/run"))
