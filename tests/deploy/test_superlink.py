"""The port of a network: the fleet's routes for admitted keys, nothing for anybody else, and limits on all of it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedveil.deploy.network_folder import NetworkFolder, make_client_key, make_network, public_key_of
from fedveil.deploy.programs import free_port

pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")


from fedveil.deploy import superlink
from fedveil.deploy.flower_api import FLEET_ROUTES, FLEET_UPLOADS
from fedveil.deploy.server_clock import clocks_that_differ, server_clock
from fedveil.deploy.superlink import FleetPort, hearing, listening, told_at
from port_visitor import asked, every_route, request, served_nothing, signed, visits

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]
ANSWER = 100_000


# --- visitors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    network: NetworkFolder
    socket: Path
    keys: list[Path]
    stranger: Path
    process: subprocess.Popen[bytes]

    def inside(self) -> Any:
        from fedveil.deploy.flower_api import Control, Endpoint

        return Control(Endpoint(self.socket, None, self.network.secret.read_bytes()))


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The program, with two admitted keys and one that is not."""
    folder = tmp_path_factory.mktemp("link")
    network, names = make_network(folder / "network", "127.0.0.1", free_port()), ("alice", "bob", "eve")
    for name in names:
        make_client_key(folder / name)
    for name in names[:2]:
        network.admit(folder / f"{name}.pub")
    at = Path("/tmp") / f"fedveil-test-{network.port}"
    command = [sys.executable, "-m", "fedveil.deploy.superlink", "--network", str(network.path), "--port", str(network.port)]
    process = subprocess.Popen([*command, "--socket", str(at), "--answer-bytes", str(ANSWER)])
    try:
        end = time.monotonic() + 120
        while not asked(network.port, request("/")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        yield Running(network, at, [folder / name for name in names[:2]], folder / "eve", process)
    finally:
        process.terminate()
        process.wait(30)
        at.unlink(missing_ok=True)


@pytest.mark.few(1)
def test_a_visitor_is_served_no_route_whatever_he_brings(link: Running) -> None:
    """Before, POST /v1/control/unregister-node and stop-run did what they say for anybody."""
    assert visits(link.network.port, [link.stranger], link.keys[0]) == {}
    assert asked(link.network.port, request("/")).startswith(b"HTTP/1.1 404 ")


def test_an_admitted_key_reaches_the_fleet_and_nothing_else(link: Running) -> None:
    from flwr.proto.fleet_pb2 import ActivateNodeRequest

    control = link.inside()
    for number, key in enumerate(link.keys):
        control.register(public_key_of(key.with_name(f"{key.name}.pub")), f"client-{number}")
    control.close()
    alice = link.keys[0]
    body = ActivateNodeRequest(public_key=public_key_of(alice.with_name("alice.pub")), heartbeat_interval=30).SerializeToString()
    answer = asked(link.network.port, request("/v1/fleet/activate-node", signed(alice), body))
    assert answer.startswith(b"HTTP/1.1 200 ")
    for path in every_route() - FLEET_ROUTES:
        assert served_nothing(asked(link.network.port, request(path, signed(alice), body))), path
    late = asked(link.network.port, request("/v1/fleet/activate-node", signed(alice, age=10_000), body))
    assert late.startswith(b"HTTP/1.1 401 ")  # Flower's own limit on the age of a signature
    wrong = asked(link.network.port, request("/v1/fleet/activate-node", signed(link.keys[1]), body))
    assert wrong.startswith(b"HTTP/1.1 401 ")  # with another's key in the request than signs it


def test_others_on_the_machine_do_not_reach_what_is_inside(link: Running) -> None:
    assert link.socket.stat().st_mode & 0o777 == 0o600
    pid = link.process.pid
    listens = {line.split()[1] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"}
    ours = {f"0100007F:{link.network.port:04X}"}
    descriptors = [Path(p).readlink() for p in Path(f"/proc/{pid}/fd").iterdir() if p.exists()]
    inodes = {str(d)[8:-1] for d in descriptors if str(d).startswith("socket:[")}
    tables = Path(f"/proc/{pid}/net/tcp").read_text() + Path(f"/proc/{pid}/net/tcp6").read_text()
    held = {line.split()[1] for line in tables.splitlines() if len(line.split()) > 9 and line.split()[9] in inodes}
    assert held & listens == ours


# --- limits -----------------------------------------------------------------------------------------------------------


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An app that answers with how many bytes it got."""
    size, more = 0, True
    while more:
        event = await receive()
        size, more = size + len(event.get("body", b"")), event.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def test_connections_and_requests_beyond_their_rate_wait(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network, alice = alone
    route, headers = sorted(FLEET_ROUTES - set(FLEET_UPLOADS))[0], signed(alice)
    once = request(route, headers).replace(b"connection: close", b"connection: keep-alive")

    def seconds(ask: Callable[[], Any]) -> float:
        begin = time.monotonic()
        ask()
        return time.monotonic() - begin

    with port_of(echo, network):
        usual = seconds(lambda: asked(network.port, once * 14 + request(route, headers)))
    monkeypatch.setattr(superlink, "REQUESTS", (10.0, 5))
    with port_of(echo, network):
        assert seconds(lambda: asked(network.port, once * 14 + request(route, headers))) > max(0.8, usual)
    monkeypatch.setattr(superlink, "CONNECTIONS", (2.0, 2))
    with port_of(echo, network):
        assert seconds(lambda: [asked(network.port, request("/")) for _ in range(4)]) > 0.8


@contextmanager
def port_of(app: Any, network: NetworkFolder, answer: int = ANSWER, tell: Callable[[str], None] = print) -> Iterator[FleetPort]:
    """A port in a thread of this process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*network.certificates)
    made: list[Any] = []
    up = threading.Event()

    async def run() -> None:
        fleet = FleetPort(app, {number: public_key_of(path) for number, path in network.admitted().items()}, answer, tell)
        with listening("127.0.0.1", network.port) as outside:
            outside.listen(200)
            stop = asyncio.Event()
            made.extend([fleet, asyncio.get_running_loop(), stop])
            accepting = asyncio.create_task(fleet.accept(outside, context))
            up.set()
            await stop.wait()
            accepting.cancel()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert up.wait(10)
        yield made[0]
    finally:
        made[1].call_soon_threadsafe(made[2].set)
        thread.join(30)


@pytest.fixture
def alone(tmp_path: Path) -> tuple[NetworkFolder, Path]:
    network = make_network(tmp_path / "network", "127.0.0.1", free_port())
    make_client_key(tmp_path / "alice")
    network.admit(tmp_path / "alice.pub")
    return network, tmp_path / "alice"


@pytest.mark.parametrize(("ahead", "word"), [(6, "6 seconds ahead"), (3600, "3600 seconds ahead"), (-310, "310 seconds behind")])
def test_clocks_that_differ_are_named_on_both_sides(ahead: int, word: str, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower says 401 to the client, which does not come up, and nothing to anybody."""
    (network, alice), lines = alone, list[str]()
    with port_of(echo, network, tell=lines.append):
        for _ in range(2):
            assert asked(network.port, request("/v1/fleet/pull-messages", signed(alice, age=-ahead))).startswith(b"HTTP/1.1 401 ")
        assert clocks_that_differ("127.0.0.1", network.port) == ""
        real = time.time
        monkeypatch.setattr("fedveil.deploy.server_clock.time", SimpleNamespace(time=lambda: real() + ahead))
        told = clocks_that_differ("127.0.0.1", network.port)
    (line,) = lines
    assert line.startswith("client 0 is turned away: the client's clock says ")
    assert word in line
    assert word[-5:] in told
    assert told.count(" UTC") == 2
    assert server_clock("127.0.0.1", free_port()) is None


@pytest.mark.parametrize("ahead", [-290, -3, 0, 3])
def test_clocks_that_are_close_enough_are_served(ahead: int, alone: Any) -> None:
    (network, alice), lines = alone, list[str]()
    with port_of(echo, network, tell=lines.append):
        assert asked(network.port, request("/v1/fleet/pull-messages", signed(alice, age=-ahead))).startswith(b"HTTP/1.1 200 ")
    assert lines == []


def ends_within(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        while connection.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_connections_that_say_nothing_are_ended(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before TLS, after it, in the middle of a header, in a body that never comes, and between two requests."""
    network, key = alone
    for name, value in {"HANDSHAKE": 0.4, "IDLE": 0.4}.items():
        monkeypatch.setattr(superlink, name, value)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    begun = request("/v1/fleet/get-run", signed(key), b"x" * 1000)
    lively = begun.replace(b"connection: close\r\n", b"")
    with port_of(echo, network):
        for said in (None, b"", b"POST /v1/fl", begun[:-500], lively):
            with socket.create_connection(("127.0.0.1", network.port)) as plain:
                if said is None:
                    assert ends_within(plain, 15)
                    continue
                with context.wrap_socket(plain) as connection:
                    connection.sendall(said)
                    assert ends_within(connection, 15), said


def test_a_crowd_of_strangers_is_bounded_and_keeps_no_client_out(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network, key = alone
    monkeypatch.setattr(superlink, "STRANGERS", 20)
    with port_of(echo, network) as fleet:
        idle = [socket.create_connection(("127.0.0.1", network.port)) for _ in range(200)]
        try:
            answer = asked(network.port, request("/v1/fleet/get-run", signed(key), b"x" * 7))
            assert answer.endswith(b"\r\n\r\n7")
            end = time.monotonic() + 15
            while len(fleet._tasks) > 20 and time.monotonic() < end:
                time.sleep(0.05)
            assert len(fleet._tasks) <= 20
            assert sum(ends_within(one, 0.05) for one in idle) >= 180
        finally:
            for one in idle:
                one.close()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (lambda head: request("/v1/fleet/get-run", head, b"x" * 2**18), b"200"),
        (lambda head: request("/v1/fleet/get-run", head, b"x" * (2**18 + 1)), b"413"),
        (lambda head: request("/v1/fleet/push-object", head, b"x" * (ANSWER + 1)), b"413"),
        (lambda head: request("/v1/fleet/get-run", head).replace(b"content-length: 0", b"content-length: 99999999999"), b"413"),
        (lambda head: request("/v1/fleet/get-run", head).replace(b"content-length: 0", b"transfer-encoding: chunked"), b"413"),
        (
            lambda head: request("/v1/fleet/get-run", head | {"transfer-encoding": "chunked"}) + b"40000\r\n" + b"x" * 2**18,
            b"413",
        ),
        (lambda head: request("/v1/fleet/get-run", head | {"Flwr-Timestamp": "1"}), b"404"),
        (lambda head: request("/v1/fleet/get-run", head | {"x": "y" * 2**15}), b""),
    ],
)
def test_a_request_has_a_limit_that_is_known_before_it_is_read(
    text: Callable[[dict[str, str]], bytes], status: bytes, alone: Any
) -> None:
    network, key = alone
    with port_of(echo, network):
        answer = asked(network.port, text(signed(key)))
    assert answer[9:12] == status


def test_a_client_may_send_as_much_as_the_messages_that_it_was_handed_are_answered_by(alone: Any) -> None:
    """An answer of 700 MB came in parts of 5 MiB, each of which is no more than a part may be."""
    from flwr.proto.fleet_pb2 import PullMessagesResponse
    from flwr.proto.message_pb2 import Message, PushObjectRequest

    network, key = alone
    handed = PullMessagesResponse(messages_list=[Message()]).SerializeToString()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, lambda event: send({**event, "body": handed} if "body" in event else event))

    def part(name: str, size: int) -> bytes:
        body = PushObjectRequest(object_id=name, object_content=b"x" * size).SerializeToString()
        return asked(network.port, request(FLEET_UPLOADS[0], signed(key), body))[9:12]

    lines = list[str]()
    with port_of(app, network, tell=lines.append):
        assert part("a", 10) == b"413"  # it was handed no message
        assert asked(network.port, request("/v1/fleet/pull-messages", signed(key)))[9:12] == b"200"
        assert part("a", 60_000) == b"200"
        assert part("a", 60_000) == b"200"  # the same part again
        assert part("b", 60_000) == b"413"
        assert part("b", 30_000) == b"200"
        assert asked(network.port, request(FLEET_UPLOADS[1], signed(key), b"x" * 20_000))[9:12] == b"413"
        said = f"client 0 sends an answer that is too large, and is refused: one has at most {ANSWER} bytes in this run"
        assert lines == [said] * 2  # once for each message
        assert asked(network.port, request("/v1/fleet/pull-messages", signed(key)))[9:12] == b"200"
        assert part("b", 60_000) == b"200"
        assert part("c", ANSWER + 1) == b"413"  # refused by its header alone
        assert lines == [said] * 3


def test_the_operator_hears_of_a_line_whenever_it_comes(tmp_path: Path) -> None:
    """Lines were read where a message was sent to a client that was missed, so that none came in the middle of a wait."""
    at, lines = tmp_path / "link", list[str]()
    told_at(at).write_text("of an earlier run\n")
    with hearing(at, lines.append):
        assert lines == []
        with told_at(at).open("a") as file:
            file.write("client 0 is turned away\n")
        end = time.monotonic() + 10
        while not lines:
            assert time.monotonic() < end
            time.sleep(0.05)
        with told_at(at).open("a") as file:
            file.write("client 1 is turned away\n")
    assert lines == ["client 0 is turned away", "client 1 is turned away"]
    assert not told_at(at).exists()


def test_what_an_app_fails_at_ends_no_port(alone: Any) -> None:
    network, key = alone

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a fault of Flower's")

    with port_of(failing, network):
        for _ in range(2):
            assert asked(network.port, request("/v1/fleet/get-run", signed(key)))[9:12] == b"500"
