"""The clocks of a client and its server: signatures contain the time, so different clocks shut a client out."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from fedveil.deploy.flower_api import clock_tolerance

_TIMEOUT = 5.0
_COARSE = 1.5
"""Possible error in seconds of a clock that is read over the network: it reports whole seconds."""


def server_clock(host: str, port: int) -> float | None:
    """Return the time at the server, in seconds since 1970, or None if it does not answer.

    The certificate is not checked, since the result is only used in a message, and its validity depends on the clock, too.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    answer = b""
    with suppress(OSError, ValueError, IndexError):
        with (
            socket.create_connection((host.strip("[]"), port), timeout=_TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as connection,
        ):
            connection.sendall(b"GET / HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n")
            while b"\r\n\r\n" not in answer and len(answer) < 2**14 and (part := connection.recv(2**12)):
                answer += part
        (date,) = [line[5:] for line in answer.decode("latin-1").split("\r\n") if line.lower().startswith("date:")]
        return parsedate_to_datetime(date.strip()).timestamp()
    return None


def clocks_that_differ(host: str, port: int) -> str:
    """Return a description of both clocks if their difference may shut this machine out, else an empty string."""
    server, client = server_clock(host, port), time.time()
    early, late = clock_tolerance()
    if server is None or _COARSE - late < client - server < early - _COARSE:
        return ""
    return two_clocks(client, server)


def two_clocks(client: float, server: float) -> str:
    """Describe both clocks, and how far they may be apart."""
    early, late = clock_tolerance()
    ahead = client - server
    client_time, server_time = (f"{datetime.fromtimestamp(t, UTC):%Y-%m-%d %H:%M:%S} UTC" for t in (client, server))
    return (
        f"the client's clock says {client_time}, and the server's {server_time}: the client's is {abs(ahead):.0f} seconds "
        f"{'ahead' if ahead > 0 else 'behind'}, and may be {early:g} ahead or {late:g} behind; set both by the network's time "
        f"(NTP)"
    )
