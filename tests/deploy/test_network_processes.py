"""Server and clients as processes, with TLS and node authentication: what several machines do, on the loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from federation_runs import config
from fedveil.deploy.demo_network import demo
from fedveil.deploy.programs import free_port
from fedveil.experiment.run import run
from fedveil.federation.plain_state import read_tree
from fedveil.ledger.ledger import Ledger
from fedveil.mechanism.mechanisms import STATE_FILE
from fedveil.verify.check_run import verify_run
from port_visitor import visits

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]
pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")

SECTIONS: dict[str, Any] = {
    "data": {"partition": {"kind": "iid", "clients": 2}},
    "training": {"clients_per_round": 2, "local_steps": 1, "rounds": 3},
}


METHODS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"name": "dp-fedavg"}, "server", {}),
    ({"name": "dp-fedavg"}, "aggregate", {}),
    ({"name": "fedanc", "variant": "proven", "pretraining_steps": 20}, "server", {}),
    ({"name": "fedglp-adp", "variant": "proven"}, "server", {}),
    ({"name": "adaptive-clipping"}, "aggregate", {}),
    ({"name": "banded-mf", "separation": 2}, "aggregate", {"training": {"clients_per_round": 1, "local_steps": 1, "rounds": 3}}),
]


def settings(view: str = "server", method: dict[str, Any] | None = None, **more: Any) -> Any:
    return config(method or {"name": "dp-fedavg"}, view, **{**SECTIONS, **more})


def written(path: Path, **more: Any) -> Path:
    path.write_text(tomli_w.dumps(settings(**more).model_dump(mode="json", exclude_none=True)))
    return path


@pytest.mark.parametrize(("method", "view", "more"), METHODS)
def test_the_demonstration_equals_inline_verifies_and_leaves_nothing(
    method: Any, view: str, more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = demo(settings(view, method, **more), tmp_path / "demo", lines.append)
    inline = run(settings(view, method, **more), tmp_path / "inline")
    assert result.model.vector.equal(inline.model.vector)
    assert [row["participants"] for row in result.history] == [row["participants"] for row in inline.history]
    assert verify_run(tmp_path / "demo").outcome == "verified"
    assert (tmp_path / "inline" / STATE_FILE).exists() == (method["name"] == "banded-mf")
    assert not (tmp_path / "demo" / STATE_FILE).exists()
    assert processes(tmp_path) == set()
    assert {path.name for path in tmp_path.iterdir()} == {"demo", "inline"}


def processes(folder: Path) -> set[str]:
    """Of Flower and of clients whose files lie there."""
    found = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {
        line
        for line in found
        if str(folder) in line and ("superlink" in line or "flower-supernode" in line or "fedveil join" in line)
    }


@contextmanager
def program(folder: Path, name: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """fedveil with these arguments in the background; gives the file with what it prints."""
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "fedveil", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
        )
    try:
        yield log
    finally:
        child.terminate()
        child.wait(60)


def fedveil(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "fedveil", *arguments], capture_output=True, text=True, cwd=folder, check=True)
    return done.stdout


def wait_until(log: Path, text: str, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < end, f"{text!r} is not in {log}:\n{log.read_text()}"
        time.sleep(0.5)


def joining(folder: Path, port: int, name: str, ca: str = "network/ca.pem", view: str = "server") -> list[str]:
    consent = {"data": {"part": ["alice", "bob"].index(name)}, "lifetime": {view: {"epsilon": 8.001, "delta": 0.01}}}
    (folder / f"{name}.toml").write_text(tomli_w.dumps(consent | {"seeded_noise": True}))
    return ["join", f"127.0.0.1:{port}", "--ca", ca, "--key", name, "--consent", f"{name}.toml", "--dir", f"{name}-state"]


def test_machines_that_come_late_are_turned_away_or_lose_their_superlink(tmp_path: Path) -> None:
    """Joined before it was admitted: retried until it is. A SuperLink that is killed: started again, and the run goes on."""
    port = free_port()
    fedveil(tmp_path, "net", "init", "--host", "127.0.0.1", "--port", str(port))
    fedveil(tmp_path, "net", "init", "--host", "127.0.0.1", "--port", str(port), "--dir", "foreign")
    for name in ("alice", "bob"):
        fedveil(tmp_path, "net", "key", name)
        assert f"is client {['alice', 'bob'].index(name)}" in fedveil(tmp_path, "net", "admit", f"{name}.pub")
    written(tmp_path / "c.toml", training={**SECTIONS["training"], "rounds": 6})
    with ExitStack() as stack:
        early = stack.enter_context(program(tmp_path, "alice", *joining(tmp_path, port, "alice")))
        wrong = stack.enter_context(program(tmp_path, "bob", *joining(tmp_path, port, "bob", "foreign/ca.pem")))
        server = stack.enter_context(program(tmp_path, "server", "serve", "c.toml", "--out", "run"))
        wait_until(server, "round 1:")
        assert "CERTIFICATE_VERIFY_FAILED" in wrong.read_text()
        os.kill(pid_of("fedveil.deploy.superlink", port), signal.SIGKILL)
        wait_until(server, "flower-superlink has ended and is started again")
        wait_until(server, "closing digest")
        assert "consented as client 0" in early.read_text()
    assert "round 5: 1 clients" in server.read_text()
    assert verify_run(tmp_path / "run").outcome == "verified"


def visit(folder: Path, port: int) -> dict[str, bytes]:
    """What a visitor with a key of his own gets at the port beyond nothing."""
    if not (folder / "eve").exists():
        fedveil(folder, "net", "key", "eve")
    return visits(port, [folder / "eve"], folder / "alice")


def carved(folder: Path, updates: list[bytes]) -> list[str]:
    """The server's files that hold any part of what a client sent."""
    there = [path for name in ("network", "run", "tmp") for path in (folder / name).rglob("*") if path.is_file()]
    return [str(path) for path in there if any(update in path.read_bytes() for update in updates)]


def sent(folder: Path) -> list[bytes]:
    """From the middle of each answer that the clients have on their own disks: integers that no noise was added to."""
    answers = [read_tree(path)["answer"] for path in folder.glob("*-state/runs/*/states/*.safetensors")]
    return [bytes(answer.numpy()[-200:-150].tobytes()) for answer in answers]


def test_a_visitor_gets_nothing_and_nothing_of_a_round_stays_on_the_servers_disk(tmp_path: Path) -> None:
    """Visits before, during and after a run; the server and its SuperLink are killed in its middle."""
    port = free_port()
    fedveil(tmp_path, "net", "init", "--host", "127.0.0.1", "--port", str(port))
    for name in ("alice", "bob"):
        fedveil(tmp_path, "net", "key", name)
        fedveil(tmp_path, "net", "admit", f"{name}.pub")
    for ending in ("", "-wal", "-shm"):
        (tmp_path / f"network/superlink.db{ending}").write_bytes(b"what clients sent to fedveil 0.2")
    (tmp_path / "tmp").mkdir()
    written(tmp_path / "c.toml", view="aggregate", training={**SECTIONS["training"], "rounds": 4})
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    assert visit(tmp_path, port) == {}
    with ExitStack() as stack:
        for name in ("alice", "bob"):
            stack.enter_context(program(tmp_path, name, *joining(tmp_path, port, name, view="aggregate")))
        first = stack.enter_context(
            program(tmp_path, "first", "serve", "c.toml", "--out", "run", "--wait", "2", environment=environment)
        )
        wait_until(first, "round 0:")
        for pid in (pid_of("fedveil serve", "--wait 2"), pid_of("fedveil.deploy.superlink", port)):
            os.kill(pid, signal.SIGKILL)
        assert len(sent(tmp_path)) >= 2
        assert carved(tmp_path, sent(tmp_path)) == []
        second = stack.enter_context(
            program(tmp_path, "second", "serve", "--resume", "run", "--wait", "2", environment=environment)
        )
        wait_until(second, "are waited for")
        assert visit(tmp_path, port) == {}
        wait_until(second, "closing digest", 400)
        assert "left out" not in second.read_text()
    assert visit(tmp_path, port) == {}
    assert carved(tmp_path, sent(tmp_path)) == []
    assert not list((tmp_path / "network").glob("superlink.db*"))
    assert verify_run(tmp_path / "run").outcome == "verified"


def pid_of(*words: object) -> int:
    found = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    (line,) = [line for line in found if all(str(word) in line for word in words)]
    return int(line.split()[0])


def test_a_server_that_is_killed_goes_on_with_the_same_model(tmp_path: Path) -> None:
    port = free_port()
    fedveil(tmp_path, "net", "init", "--host", "127.0.0.1", "--port", str(port))
    for name in ("alice", "bob"):
        fedveil(tmp_path, "net", "key", name)
    written(tmp_path / "c.toml", training={**SECTIONS["training"], "rounds": 4})
    with ExitStack() as stack:
        stack.enter_context(program(tmp_path, "alice", *joining(tmp_path, port, "alice")))
        stack.enter_context(program(tmp_path, "bob", *joining(tmp_path, port, "bob")))
        for name in ("alice", "bob"):
            fedveil(tmp_path, "net", "admit", f"{name}.pub")
        first = stack.enter_context(program(tmp_path, "first", "serve", "c.toml", "--out", "run", "--wait", "2"))
        wait_until(first, "round 0:")
        os.kill(pid_of("fedveil serve", "--wait 2"), signal.SIGKILL)
        time.sleep(2)
        second = stack.enter_context(program(tmp_path, "second", "serve", "--resume", "run", "--wait", "2"))
        wait_until(second, "closing digest", 400)
    inline = run(settings(training={**SECTIONS["training"], "rounds": 4}), tmp_path / "inline")
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "inline/model.safetensors").read_bytes()
    assert inline.closing
    assert verify_run(tmp_path / "run").outcome == "verified"
    for name in ("alice", "bob"):
        (ledger,) = (tmp_path / f"{name}-state/runs").glob("*/ledger.sqlite")
        with Ledger.open(ledger) as own:
            assert [entry.round for _, _, entry in own.entries()] == [0, 1, 2, 3]
