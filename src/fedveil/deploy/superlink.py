"""Flower's SuperLink as a program of fedveil: everything at a socket of its owner, only the fleet's routes at the port.

    python -m fedveil.deploy.superlink --network FOLDER --port PORT --socket PATH --answer-bytes N

Flower serves the routes of its fleet, its control interface and its runtime at one port. Here the app has no port: the server's
process reaches it at a socket in a private folder. The port belongs to this program. It serves the routes that a SuperNode needs,
to admitted keys, and answers 404 to everything else; it reads no body before that check. The SuperLink's data of a run are in the
memory of this process, and never on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

import h11

from fedveil.deploy.flower_api import (
    FLEET_ROUTES,
    FLEET_UPLOADS,
    carried,
    clock_ahead,
    has_message,
    is_signed_by,
    signer,
    superlink_app,
)
from fedveil.deploy.membership import end_of
from fedveil.deploy.network_folder import NetworkFolder, open_network, public_key_of
from fedveil.deploy.server_clock import two_clocks
from fedveil.errors import ConfigError

HANDSHAKE = 30.0
"""Seconds from a connection to the end of its first request's header, which must be signed by an admitted key."""
IDLE = 60.0
"""Seconds between two requests of a connection."""
LINGER, QUIET = 5.0, 0.5
"""Seconds for which the rest of a refused request is discarded: in total, and without a byte."""
FOLLOWED = 2.0
"""Seconds between two looks at the network's folder."""
HEARD = 1.0
"""Seconds after which the operator gets a line at the latest."""
SLOWEST = 2.0**14
"""Least speed of a body in bytes per second, after the time for a header."""
STRANGERS, EACH = 128, 16
"""Connections without an admitted key, in total, and per admitted key: beyond that, the oldest is closed."""
CONNECTIONS, REQUESTS = (10.0, 100), (50.0, 500)
"""Rate per second, and burst: of connections from one address, and of requests with one key. What is beyond waits."""
_OWNERS = 10_000
"""Owners of turns that are remembered before those of long ago are forgotten."""
_HEADER, _SMALL, _UPLOAD = 2**14, 2**18, 2**16 + 5 * 2**20
"""Limits in bytes of a header, a body, and a body with part of an answer (Flower sends 5 MiB at a time)."""
_OUTSTANDING = 4
"""Messages of one client whose answers may be pending."""
_REASONS = {401: "Unauthorized", 404: "Not Found", 413: "Content Too Large"}
_DROPPED = {b"host", b"connection", b"content-length", b"transfer-encoding", b"expect", b"upgrade"}
_log = logging.getLogger(__name__)


class _Unserved(Exception):
    """Raised for a request that is not passed to a route of Flower; the connection ends with `status`."""

    def __init__(self, status: int) -> None:
        self.status = status


@dataclass
class _Allowance:
    """Bytes of answers that one client may still send: for the messages that it was given only."""

    left: int = 0
    sent: set[bytes] = field(default_factory=set)

    def grant(self, answer: int) -> None:
        """Allow an answer, because a message was given out."""
        self.left = min(self.left + answer, _OUTSTANDING * answer)
        self.sent.clear()

    def take(self, name: bytes, size: int) -> bool:
        """Return whether a part of an answer is accepted; a repeated part is counted once."""
        if name in self.sent:
            return True
        if size > self.left:
            return False
        self.left -= size
        self.sent.add(name)
        return True


class _Open:
    """Open connections by owner: beyond the limit, the oldest connection of the owner with the most is closed."""

    def __init__(self, most: int) -> None:
        self.most, self.tasks = most, dict[asyncio.Task[Any], Hashable]()

    @contextmanager
    def one(self, whose: Hashable) -> Iterator[None]:
        """Count the current task for the duration of the block."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks[task] = whose
        try:
            if len(self.tasks) > self.most:
                (largest, _), *_ = Counter(self.tasks.values()).most_common(1)
                oldest = next(other for other, name in self.tasks.items() if name == largest)
                self.leave(oldest)
                oldest.cancel()
            yield
        finally:
            self.leave(task)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Stop counting the task."""
        self.tasks.pop(task, None)


class _Pace:
    """Turns of each owner: a burst at once, and afterwards one turn after another at a steady rate."""

    def __init__(self, rate: float, burst: int) -> None:
        self.rate, self.burst, self._next = rate, burst, dict[Hashable, float]()

    def wait(self, whose: Hashable) -> float:
        """Take a turn, and return the seconds until it comes."""
        now = time.monotonic()
        if len(self._next) > _OWNERS:
            self._next = {owner: at for owner, at in self._next.items() if at > now - self.burst / self.rate}
        at = max(self._next.get(whose, -math.inf), now - self.burst / self.rate) + 1 / self.rate
        self._next[whose] = at
        return max(0.0, at - now)


class FleetPort:
    """Handler of the connections at the port.

    Args:
        app: Flower's. admitted: public key (PEM) of each client.
        answer: largest size of an answer in bytes. tell: called with a line for the server's operator.
    """

    def __init__(self, app: Any, admitted: Mapping[int, bytes], answer: int, tell: Callable[[str], None] = _log.warning) -> None:
        import httpx

        self._tell, self._warned, self._large = tell, set[bytes](), set[bytes]()

        self.answer, self.admitted = answer, set(admitted.values())
        self._allowances = {key: _Allowance() for key in self.admitted}
        self._numbers = {key: number for number, key in admitted.items()}
        self._app = httpx.AsyncClient(transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://app")
        self._connecting, self._asking = _Pace(*CONNECTIONS), _Pace(*REQUESTS)
        self._strangers, self._by_key = _Open(STRANGERS), {key: _Open(EACH) for key in self.admitted}
        self._tasks = set[asyncio.Task[None]]()

    def keep(self, admitted: Collection[bytes]) -> None:
        """Turn away the keys that are no longer among these, whose next request is the last one of their connection."""
        for key in self.admitted - set(admitted):
            self.admitted.remove(key)
            self._tell(f"client {self._numbers[key]} is removed, and turned away from now on")

    async def accept(self, listening: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections forever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as problem:  # out of descriptors, or closed before it was accepted
                _log.warning("a connection could not be taken: %s", problem)
                await asyncio.sleep(0.1)
                continue
            task = loop.create_task(self._connected(connection, address[0], context))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connected(self, connection: socket.socket, address: str, context: ssl.SSLContext) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=2**17)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.BaseTransport | None = None
        try:
            with self._strangers.one(address):
                async with asyncio.timeout(HANDSHAKE):
                    await asyncio.sleep(self._connecting.wait(address))
                    transport, _ = await loop.connect_accepted_socket(
                        lambda: protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE, ssl_shutdown_timeout=5
                    )
                    speaker = _Speaker(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
                    head = await speaker.head()
                    key = self._key(head)
                with self._by_key[key].one(key):
                    self._strangers.leave(asyncio.current_task())  # type: ignore[arg-type]
                    while True:
                        await asyncio.sleep(self._asking.wait(key))
                        await self._serve(speaker, head, key)
                        async with asyncio.timeout(IDLE):
                            head = await speaker.head()
                        if self._key(head) != key:
                            raise _Unserved(404)
        except _Unserved as refusal:
            with suppress(OSError, TimeoutError, EOFError, h11.ProtocolError):
                await speaker.refuse(refusal.status)
        except (OSError, TimeoutError, EOFError, h11.ProtocolError, asyncio.CancelledError):
            pass
        finally:
            if transport is None:
                connection.close()
            elif isinstance(transport, asyncio.Transport):
                transport.abort() if transport.is_closing() else transport.close()

    def _key(self, head: h11.Request) -> bytes:
        """Return the admitted key that signed a request to a route of the fleet."""
        headers = dict(head.headers)
        key = signer(headers)
        if len(headers) < len(head.headers):  # of two headers with one name the app may use the other one
            raise _Unserved(404)
        allowed = head.method == b"POST" and head.target.decode("ascii", "replace") in FLEET_ROUTES and key in self.admitted
        if not allowed or not is_signed_by(key, headers):
            raise _Unserved(404)
        if ahead := clock_ahead(headers, now := time.time()):
            if key not in self._warned:
                self._tell(f"client {self._numbers[key]} is turned away: {two_clocks(now + ahead, now)}")
            self._warned.add(key)
            raise _Unserved(401)
        self._warned.discard(key)
        return key

    def _refuse_large(self, key: bytes) -> NoReturn:
        """Refuse what is too large; the operator is told once for each message that the client was given."""
        if key not in self._large:
            self._tell(
                f"client {self._numbers[key]} sends an answer that is too large, and is refused: one has at most "
                f"{self.answer} bytes in this run"
            )
        self._large.add(key)
        raise _Unserved(413)

    async def _serve(self, speaker: _Speaker, head: h11.Request, key: bytes) -> None:
        path, headers = head.target.decode(), dict(head.headers)
        size = headers.get(b"content-length", b"")
        uploads = path in FLEET_UPLOADS
        coded = b"transfer-encoding" in headers  # its content-length would be meaningless
        if coded or not size.isdigit() or int(size) > (min(self.answer, _UPLOAD) if path == FLEET_UPLOADS[0] else _SMALL):
            self._refuse_large(key)
        async with asyncio.timeout(HANDSHAKE + int(size) / SLOWEST):
            body = await speaker.body()
        if uploads and not self._allowances[key].take(carried(path, body), len(body)):
            self._refuse_large(key)
        passed = [(name, value) for name, value in head.headers if name.lower() not in _DROPPED]
        answer = await self._app.post(path, content=body, headers=passed, timeout=None)
        if has_message(path, answer.content):
            self._allowances[key].grant(self.answer)
            self._large.discard(key)
        async with asyncio.timeout(HANDSHAKE + len(answer.content) / SLOWEST):
            passed = [(name, value) for name, value in answer.headers.raw if name.lower().startswith((b"content-type", b"flwr-"))]
            await speaker.answer(answer.status_code, passed, answer.content)


class _Speaker:
    """HTTP on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEADER)

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(2**16))
        return event

    async def head(self) -> h11.Request:
        """Return the header of the next request; raise EOFError if none comes, or it is too long."""
        event = await self._event()
        if not isinstance(event, h11.Request) or sum(len(name) + len(value) for name, value in event.headers) > _HEADER:
            raise EOFError
        return event

    async def body(self) -> bytes:
        """Return the body of the request."""
        parts: list[bytes] = []
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise EOFError
            parts.append(bytes(event.data))
        return b"".join(parts)

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        """Answer the request, and prepare for the next one."""
        length = (b"content-length", str(len(content)).encode())
        await self._send(h11.Response(status_code=status, headers=[length, *headers]), h11.Data(data=content), h11.EndOfMessage())
        self._http.start_next_cycle()

    async def refuse(self, status: int) -> None:
        """Send an error status, and end.

        Closing a socket with unread bytes resets the connection, which may lose the answer.
        """
        headers = [("content-length", "0"), ("connection", "close"), ("date", formatdate(time.time(), usegmt=True))]
        async with asyncio.timeout(LINGER):
            await self._send(h11.Response(status_code=status, headers=headers, reason=_REASONS[status]), h11.EndOfMessage())
            while self._http.their_state is h11.SEND_BODY:
                await asyncio.wait_for(self._event(), QUIET)

    async def _send(self, *events: Any) -> None:
        for event in events:
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()


async def run(network: NetworkFolder, port: int, at: Path, answer: int) -> None:
    """Serve until the process is told to end.

    Args:
        port: of the fleet. at: path of the socket at which the server's process reaches everything. answer: as in `FleetPort`.
    """
    import uvicorn

    app = superlink_app(network.secret.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*network.certificates)

    def tell(line: str) -> None:
        with told_at(at).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    fleet = FleetPort(app, {number: public_key_of(path) for number, path in network.admitted().items()}, answer, tell)
    with socket.socket(socket.AF_UNIX) as inside, listening(network.address, port) as outside:
        with suppress(FileNotFoundError):
            at.unlink()
        inside.bind(str(at))
        at.chmod(0o600)
        inside.listen(128)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))

        async def open_port() -> None:
            while not server.started:
                await asyncio.sleep(0.02)
            outside.listen(STRANGERS)
            await asyncio.gather(fleet.accept(outside, context), follow(network, context, fleet, tell))

        opened = asyncio.create_task(open_port())
        await server.serve(sockets=[inside])
        opened.cancel()


async def follow(network: NetworkFolder, context: ssl.SSLContext, fleet: FleetPort, tell: Callable[[str], None]) -> None:
    """Follow the network's folder for ever: use a renewed certificate, and turn away removed keys, without a restart."""
    used, ended = network.certificates[0].stat().st_mtime_ns, False
    while True:
        await asyncio.sleep(FOLLOWED)
        try:
            fleet.keep({public_key_of(path) for path in network.admitted().values()})
            if (now := network.certificates[0].stat().st_mtime_ns) != used:
                context.load_cert_chain(*network.certificates)
                used, ended = now, False
            if not ended and time.time() > end_of(network.certificates[0]):
                ended_now = f"the certificate {network.certificates[0]} has ended, and no client connects"
                tell(f"{ended_now}: fedveil net renew makes a new one, which needs no restart")
                ended = True
        except (OSError, ConfigError) as problem:  # it is being changed: its key is new, and its certificate not yet
            _log.warning("%s cannot be followed: %s", network.path, problem)


def told_at(at: Path) -> Path:
    """Return the file next to the socket with the lines for the server's operator."""
    return at.with_name(f"{at.name}.told")


@contextmanager
def hearing(at: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Report the lines for the operator as they come, whatever this process waits for; the file exists only during the block."""
    file, ended = told_at(at), Event()
    file.unlink(missing_ok=True)

    def hear() -> None:
        reported, last = 0, False
        while not last:
            last = ended.wait(HEARD)
            lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
            for line in lines[reported:]:
                tell(line)
            reported = len(lines)

    thread = Thread(target=hear, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        file.unlink(missing_ok=True)


def listening(address: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet."""
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setblocking(False)
    bound.bind((address, port))
    return bound


def main(words: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="fedveil.deploy.superlink")
    for name, kind in (("--network", Path), ("--port", int), ("--socket", Path), ("--answer-bytes", int)):
        parser.add_argument(name, type=kind, required=True)
    given = parser.parse_args(words)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(run(open_network(given.network), given.port, given.socket, given.answer_bytes))


if __name__ == "__main__":
    main()
