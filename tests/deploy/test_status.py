"""What an operator sees: status.json, metrics, notifications of systemd, lines as JSON, logs that do not grow for ever."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.deploy import programs
from fedveil.deploy.network_folder import make_network
from fedveil.deploy.programs import Program, free_port, running
from fedveil.deploy.status import METRICS, Status, json_line, printer, read_status
from fedveil.errors import ConfigError, FedveilError

ROW = {"round": 2, "participants": 3, "seconds": 1.5, "epsilon_spent": 0.75, "failures": {1: "no answer within 2 seconds"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_network(tmp_path / "network", "127.0.0.1", 9700).path


def test_the_status_says_where_a_run_stands_and_that_of_a_process_that_hangs_is_no_answer(folder: Path) -> None:
    with Status(folder, folder / "server.pem") as status:
        status.update(run="r", rounds=5, clients=4, clients_online=3, clients_consented=3)
        status.row(ROW)
        values = read_status(folder)
        assert {name: values[name] for name in METRICS if name not in ("answers", "disk_free_bytes", "certificate_days")} == {
            "rounds": 5,
            "rounds_done": 3,
            "clients": 4,
            "clients_online": 3,
            "clients_consented": 3,
            "clients_late": 1,
            "epsilon_spent": 0.75,
            "round_seconds": 1.5,
        }
        assert 364 < values["certificate_days"] <= 365
        assert values["disk_free_bytes"] == pytest.approx(shutil.disk_usage(folder).free, rel=0.1)
        done = CliRunner().invoke(app, ["net", "status", "--dir", str(folder)])
        assert json.loads(done.output)["run"] == "r"
        with pytest.raises(FedveilError, match=r"was written \d+ seconds ago: its process has ended or hangs"):
            read_status(folder, time.time() + 100)
    assert json.loads((folder / "status.json").read_text())["state"] == "ended"
    assert (folder / "status.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FedveilError, match="holds no status"):
        read_status(folder.parent)


def test_a_full_disk_ends_no_run_by_its_status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedveil.deploy.status.replace_whole", full)
    with Status(folder, folder / "server.pem") as status:
        status.row(ROW)
    assert not (folder / "status.json").exists()


def test_prometheus_finds_the_same_numbers(folder: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client (pip install 'fedveil[metrics]')")
    port = free_port()
    with Status(folder, folder / "server.pem", f"127.0.0.1:{port}") as status:
        status.row(ROW)
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        with pytest.raises(ConfigError, match="choose another port"), Status(folder, folder / "ca.pem", f"127.0.0.1:{port}"):
            pass
    assert "# TYPE fedveil_rounds_done gauge\nfedveil_rounds_done 3.0\n" in text
    assert "fedveil_epsilon_spent 0.75\n" in text
    with pytest.raises(ConfigError, match="expected HOST:PORT"), Status(folder, folder / "ca.pem", "9100"):
        pass


def test_systemd_hears_when_the_service_is_up_and_what_it_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Path("/tmp") / f"fedveil-notify-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(at))
        notified.settimeout(5)
        try:
            monkeypatch.setenv("NOTIFY_SOCKET", str(at))
            with Status(folder, folder / "server.pem") as status:
                status.ready()
                status.row(ROW)
            heard = [notified.recv(4096).decode() for _ in range(5)]
        finally:
            at.unlink()
    assert heard == ["STATUS=starting", "READY=1", "STATUS=round 3 has ended", "STOPPING=1", "STATUS=ended"]


def test_lines_as_json_name_run_round_and_client(capsys: pytest.CaptureFixture[str]) -> None:
    tell = printer("json", lambda: {"run": "20261128-abc"})
    try:
        tell("round 3: client 1 is left out: no answer within 600 seconds")
        tell("clients: 3 consented, 3 needed")
        logging.getLogger("fedveil.x").warning("a message was lost: %s", "x\ny")
    finally:
        logging.basicConfig(handlers=[], force=True)
    output = capsys.readouterr()
    left_out, waiting = map(json.loads, output.out.splitlines())
    logged = json.loads(output.err)
    assert datetime.fromisoformat(left_out.pop("time")).tzinfo == UTC
    message = "round 3: client 1 is left out: no answer within 600 seconds"
    assert left_out == {"level": "warning", "run": "20261128-abc", "round": 3, "client": 1, "message": message}
    assert (waiting["level"], "client" in waiting) == ("info", False)
    assert (logged["level"], logged["logger"], logged["message"]) == ("warning", "fedveil.x", "a message was lost: x\ny")
    of_client = json.loads(json_line("run r-1, round 2: answered with 17 bytes"))
    assert (of_client["run"], of_client["round"], of_client["level"]) == ("r-1", 2, "info")


def test_the_log_of_a_program_is_begun_anew_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_LOG", 50_000)
    chatty = "import time\nfor number in range(10**6): print('x' * 99, number, flush=True); time.sleep(1e-4)"
    command = [Path(sys.executable).name, "-c", chatty]
    with running(Program(command, tmp_path / "home", tmp_path / "log"), print, 1.0):
        end = time.monotonic() + 30
        while not (tmp_path / "log.2").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("log*"))]
    assert len(sizes) == 3
    assert max(sizes) < 2_000_000
    assert (tmp_path / "log.1").stat().st_mode & 0o777 == 0o600
