"""A client's process: it has the data, the consent and the ledgers, and answers what its SuperNode brings.

The SuperNode carries messages, and runs nothing. It is started again whenever it ends: before the client is admitted, and for a
minute after a SuperNode with the same key was lost, the server turns it away (Flower's exit 305).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from subprocess import Popen

from fedveil.errors import ConfigError
from fedveil.federation.plain_state import write_whole
from fedveil.flower.flower_messages import printable
from fedveil.flower.wire_format import WireError
from fedveil.network.certificates import check_readable
from fedveil.network.consent import Consent
from fedveil.network.flower_api import Endpoint, TaskQueue, answer_message, bundle, require_fleet_routes
from fedveil.network.joined_client import JoinedClient
from fedveil.network.programs import Program, ended_by_signal, free_port, running
from fedveil.network.server_clock import clocks_that_differ

_POLL = 0.2
_RETRY = 10.0
_FAREWELL = 5.0
"""Seconds that an answer has to leave after which the client ends."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joining:
    """How a client reaches its server.

    Args:
        server: host:port. authority: the certificate `ca.pem` that the server's operator handed over. key: its private key.
        folder: its own, for ledgers and states. check: show what is offered, and take no part.
        tell: called with a line for each thing that happens. until: asked between messages whether to end.
    """

    server: str
    authority: Path
    key: Path
    folder: Path
    check: bool = False
    tell: Callable[[str], None] = lambda line: None
    until: Callable[[], bool] = lambda: False


def join(consent: Consent, joining: Joining) -> bool:
    """Answer offers and rounds, until it is told to end.

    Returns:
        With `check`, whether this client would take part in what was offered, with all of its data.

    Raises:
        ConfigError: certificate or key are missing, or something else; or another process takes part there with this folder.
            FedveilError: Flower is not there.
    """
    for what, path in (("--ca", joining.authority), ("--key", joining.key)):
        if not path.is_file():
            raise ConfigError(f"{what} {path}: there is no such file")
    host, _, port_of_server = joining.server.rpartition(":")
    if not (host and port_of_server.isdecimal() and 0 < int(port_of_server) < 65536):
        raise ConfigError(f"the server is named as host:port, such as 192.0.2.7:9700, got {joining.server!r}")
    require_fleet_routes()
    check_readable(joining.authority, joining.key)
    import torch

    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    client, port = JoinedClient(joining.folder, consent, joining.tell, check=joining.check), free_port()
    expected = hashlib.sha256(bundle()).hexdigest()

    def tell(line: str) -> None:
        clocks = clocks_that_differ(host, int(port_of_server))
        joining.tell(line + (f" ({clocks})" if clocks else advice(line, joining)))

    with ExitStack() as stack:
        secret = stack.enter_context(_alone(joining))
        endpoint = Endpoint(f"127.0.0.1:{port}", None, secret.read_bytes())
        stack.enter_context(ended_by_signal())
        supernode = stack.enter_context(running(_supernode(joining, port, secret, consent.limits.memory), tell, _RETRY))
        queue = TaskQueue(endpoint, "flwr-clientapp")
        asked: Queue[tuple[list[bytes], Future[bytes]]] = Queue()

        refused = ""

        def refuse(reason: str) -> None:  # the server offers again and again
            nonlocal refused
            if reason != refused:
                joining.tell(f"a message was refused: {printable(reason)}")
            refused = reason

        joining.tell(f"waiting for what {joining.server} offers, once it runs and this key is admitted")
        try:
            end = math.inf
            while not joining.until() and time.monotonic() < end:
                token = queue.take()
                if token is not None:
                    carried = (endpoint, token, expected, asked, supernode.process, refuse)
                    threading.Thread(target=_carry, args=carried, daemon=True).start()
                with suppress(Empty):
                    _answer(client, *asked.get(timeout=_POLL))
                if client.has_looked:
                    end = min(end, time.monotonic() + _FAREWELL)
        finally:
            queue.close()
    return client.fits


@contextmanager
def _alone(joining: Joining) -> Iterator[Path]:
    """The secret of this process, in a file that no other one at the same server with the same folder can have.

    The claim lies in the kernel and ends with the process, however it ends.

    Raises:
        ConfigError: another process has it.
    """
    where = re.sub(r"[^A-Za-z0-9.]+", "-", joining.server)
    owner = joining.folder / f"joined-{where}"
    descriptor = os.open(owner, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"--dir {joining.folder}: another process (its number: {holder}) has joined {joining.server} with it, and "
                f"goes on: end it first; another client needs a --dir and a --key of its own"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        secret = joining.folder / f"secret-{where}"
        write_whole(secret, secrets.token_bytes(32))
        yield secret
    finally:
        os.close(descriptor)


def advice(line: str, joining: Joining) -> str:
    """What to do where Flower's own words name no cause, or nothing."""
    unknown = (
        f"this key is not admitted: send {joining.key}.pub to the server's operator, who runs `fedveil net admit` and starts the "
        f"server again; this client tries again every {_RETRY:g} seconds"
    )
    found = {
        "must be registered": unknown,
        "404 Not Found": unknown,
        "activate SuperNode": f"this key is not admitted, or was online a moment ago. Not admitted: send {joining.key}.pub to "
        f"the server's operator, who runs `fedveil net admit` and starts the server again. Admitted: the server counts an "
        f"earlier connection for up to a minute, and one of another process with this key for ever. This client tries again "
        f"every {_RETRY:g} seconds",
        "CERTIFICATE_VERIFY_FAILED": f"the certificate at {joining.server} is not of the authority in {joining.authority}: ask "
        f"the server's operator for its ca.pem, and for the name that it was made for (fedveil net init --host)",
    }
    return next((f" ({said})" for words, said in found.items() if words in line), "")


def _carry(
    endpoint: Endpoint,
    token: str,
    expected: str,
    asked: Queue[tuple[list[bytes], Future[bytes]]],
    supernode: Popen[bytes] | None,
    refuse: Callable[[str], None],
) -> None:
    """Carry one message in and its answer out; in a thread of its own, for one that never arrives blocks no other."""
    try:
        if reason := answer_message(endpoint, token, expected, partial(_through, asked)):
            refuse(reason)
    except Exception as problem:  # of the connection: the message is lost, the client stays
        _log.warning("a message was lost: %s", problem)
        if supernode is not None:  # which would wait for this answer for ever; started again, it is asked anew
            supernode.terminate()


def _through(asked: Queue[tuple[list[bytes], Future[bytes]]], parts: list[bytes]) -> bytes:
    """The answer, made by the thread that has the ledgers."""
    answer: Future[bytes] = Future()
    asked.put((parts, answer))
    return answer.result()


def _answer(client: JoinedClient, parts: list[bytes], answer: Future[bytes]) -> None:
    try:
        answer.set_result(client.answer(parts))
    except WireError as problem:
        answer.set_exception(problem)
    except Exception:  # whose words may tell of the data
        _log.exception("a message was not answered")
        answer.set_exception(WireError("an error at the client, which its own log describes"))


def _supernode(joining: Joining, port: int, secret: Path, memory: int) -> Program:
    command = ["flower-supernode", "--superlink", joining.server, "--root-certificates", str(joining.authority)]
    command += ["--auth-supernode-private-key", str(joining.key), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    return Program(command, joining.folder / "flower", joining.folder / "supernode.log", memory=memory)
