"""The state of a server or a client for its operator: status.json, metrics for Prometheus, notes to systemd, lines as JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from fedveil import __version__
from fedveil.deploy.membership import end_of
from fedveil.errors import ConfigError, FedveilError
from fedveil.ledger.files import replace_whole

if TYPE_CHECKING:
    from fedveil.federation.history import Row

LogFormat = Literal["text", "json"]

FRESH = 60.0
"""Seconds after which a status that was not written again belongs to a process that has ended or hangs."""
_PERIOD = 15.0
_DAY = 86400.0

METRICS = {
    "rounds": "Rounds of the run.",
    "rounds_done": "Rounds that have ended.",
    "clients": "Clients of the run.",
    "clients_online": "Clients that are online.",
    "clients_consented": "Clients that have consented.",
    "clients_late": "Clients that were left out of the last round.",
    "epsilon_spent": "Proven epsilon of the releases so far.",
    "round_seconds": "Duration of the last round in seconds.",
    "answers": "Answers that this client has sent.",
    "certificate_days": "Days until the certificate ends.",
    "disk_free_bytes": "Free space on the disk of the folder.",
}
"""Numbers in status.json, each a gauge `fedveil_NAME`, and what they are."""


class Status:
    """State of a server or a client, in `status.json` of its folder while the block runs, written every few seconds.

    Args:
        folder: of the network, or of the client. certificate: whose end is reported. metrics: HOST:PORT at which Prometheus
            finds the numbers, or "".
    """

    def __init__(self, folder: Path, certificate: Path, metrics: str = "") -> None:
        self.path, self._certificate, self._metrics = folder / "status.json", certificate, metrics
        self.values: dict[str, Any] = {"fedveil": __version__, "pid": os.getpid(), "state": "starting"}
        self._ended, self._lock = threading.Event(), threading.Lock()

    def update(self, **values: Any) -> None:
        """Change values, and write all at once if one of them is another."""
        if any(self.values.get(name, ...) != value for name, value in values.items()):
            self._write(values)

    def _write(self, values: Mapping[str, Any]) -> None:
        with self._lock:
            self.values |= values
            now = time.time()
            with suppress(ConfigError):  # it is being renewed
                self.values["certificate_days"] = round((end_of(self._certificate) - now) / _DAY, 2)
            self.values["disk_free_bytes"] = shutil.disk_usage(self.path.parent).free
            self.values["updated"] = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ}"
            with suppress(OSError):  # a full disk ends no run by its status
                replace_whole(self.path, json.dumps(self.values, indent=1).encode() + b"\n", private=True)
        notify(f"STATUS={self.values['state']}")

    def ready(self) -> None:
        """Tell systemd that the service is up."""
        notify("READY=1")

    def row(self, row: Row) -> None:
        """Take over what a round of the history says."""
        done = {"rounds_done": row["round"] + 1, "clients_late": len(row.get("failures") or ()), "round_seconds": row["seconds"]}
        spent = {"epsilon_spent": row["epsilon_spent"]} if "epsilon_spent" in row else {}
        self.update(state=f"round {row['round'] + 1} has ended", **done, **spent)

    def __enter__(self) -> Self:
        self._server = _served(self, self._metrics) if self._metrics else None
        self._write({})
        threading.Thread(target=self._written, daemon=True).start()
        return self

    def _written(self) -> None:
        while not self._ended.wait(_PERIOD):
            self._write({})

    def __exit__(self, kind: object, *error: object) -> None:
        self._ended.set()
        notify("STOPPING=1")
        self.update(state="ended" if kind is None else "interrupted")
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def notify(line: str) -> None:
    """Send a line to systemd, if it started this process and wants to be notified."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.sendto(line.encode(), "\0" + address[1:] if address.startswith("@") else address)


def read_status(folder: Path, now: float | None = None) -> dict[str, Any]:
    """Return the status of the server or client with this folder.

    Raises:
        FedveilError: there is none, or the process has ended or hangs.
    """
    path = folder / "status.json"
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        written = datetime.fromisoformat(values["updated"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise FedveilError(f"{path} holds no status ({problem}): give the folder of a network or a client") from None
    if (age := (time.time() if now is None else now) - written) > FRESH:
        raise FedveilError(f"{path} was written {age:.0f} seconds ago: its process has ended or hangs ({values.get('state')})")
    return values


def _served(status: Status, address: str) -> Any:
    """Return a running HTTP server with the numbers in Prometheus's format.

    Raises:
        ConfigError: the address is none, cannot be used, or prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily
    except ImportError:
        raise ConfigError("--metrics needs prometheus-client, which is not installed: pip install 'fedveil[metrics]'") from None
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"--metrics {address}: expected HOST:PORT, such as 127.0.0.1:9100", key="--metrics", value=address)

    class Gauges:
        def collect(self) -> Iterator[Any]:
            for name, text in METRICS.items():
                if isinstance(value := status.values.get(name), int | float):
                    yield GaugeMetricFamily(f"fedveil_{name}", text, value=value)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Gauges())
    try:
        server, _ = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as problem:
        raise ConfigError(f"--metrics {address} cannot be used ({problem.strerror}): choose another port") from None
    return server


_NUMBERS = {"round": re.compile(r"\bround (\d+)"), "client": re.compile(r"\bclient (\d+)")}
_RUN = re.compile(r"^run ([\w.-]+)[,:]")
_WARNING = re.compile(r"left out|refused|turned away|has ended|cannot|ends on|not admitted")


def json_line(text: str, level: str = "", fields: Mapping[str, Any] | None = None) -> str:
    """Return a line for the operator as JSON: time, level, message, and the run, round and client that it names."""
    named: dict[str, Any] = {name: int(at[1]) for name, pattern in _NUMBERS.items() if (at := pattern.search(text))}
    named |= {"run": at[1]} if (at := _RUN.search(text)) else {}
    values = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level or _level(text)}
    return json.dumps({**values, **(fields or {}), **named, "message": text}, default=str)


def _level(text: str) -> str:
    return "warning" if _WARNING.search(text) else "info"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json_line(super().format(record), record.levelname.lower(), {"logger": record.name})


def printer(log_format: LogFormat, status: Callable[[], Mapping[str, Any]] = dict) -> Callable[[str], None]:
    """Return the function that prints a line for the operator, and let Python's logs have the same format.

    Args:
        status: returns the values of which `run` is added to each line.
    """
    if log_format == "text":
        return lambda line: print(line, flush=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)

    def tell(line: str) -> None:
        known = status()
        print(json_line(line, fields={"run": known["run"]} if "run" in known else {}), flush=True)

    return tell
