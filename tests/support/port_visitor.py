"""A visitor at the port of a network, who has no key that was admitted."""

from __future__ import annotations

import base64
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil.deploy.flower_api import FLEET_ROUTES, superlink_app
from fedveil.deploy.network_folder import public_key_of


def signed(key: Path, *, age: float = 0.0, of: Path | None = None) -> dict[str, str]:
    """The headers of a SuperNode with that key; with `of`, under the name of another one."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    private = load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    stamp = datetime.fromtimestamp(time.time() - age, UTC).isoformat()
    signature = private.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
    public = public_key_of((of or key).with_name(f"{(of or key).name}.pub"))
    return {
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": base64.b64encode(signature).decode(),
        "content-type": PROTOBUF_MEDIA_TYPE,
    }


def asked(port: int, text: bytes, *, tls: bool = True, patience: float = 20.0) -> bytes:
    """What comes back for these bytes; an empty one where the connection is refused or ended."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    found = b""
    with suppress(OSError), ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=patience))
        if tls:
            connection = stack.enter_context(context.wrap_socket(connection))
        connection.sendall(text)
        while part := connection.recv(2**16):
            found += part
    return found


def request(path: str, headers: dict[str, str] | None = None, body: bytes = b"", method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in (headers or {}).items()), "", ""]).encode() + body


def every_route() -> set[str]:
    """All that Flower's app has, those among them that no schema lists."""
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    def paths(routes: Any) -> Iterator[str]:
        for route in routes:
            yield from [route.path] if getattr(route, "path", "") else paths(getattr(route, "routes", ()))

    app = superlink_app(b"s" * 32)
    found = {*app.openapi()["paths"], *paths(app.routes), *(path for _, path in PROTOBUF_REQUEST_TYPES)}
    assert {"/v1/control/stop-run", "/v1/runtime/acquire-task", "/docs", "/health", *FLEET_ROUTES} <= found
    return {*found, "/", "/v1/fleet/", "/metrics", "/v1/fleet/../control/list-nodes", "//v1/control/list-nodes", "*"}


def visits(port: int, keys: list[Path], admitted: Path) -> dict[str, bytes]:
    """Each answer to a visitor that is not that of a route which is not served.

    Args:
        keys: of the visitor, who knows the public half of `admitted`, too.
    """
    headers: list[dict[str, str]] = [{}]
    headers += [signed(key) for key in keys] + [signed(key, of=admitted) for key in keys]
    got = {}
    for path in sorted(every_route()):
        for number, given in enumerate(headers):
            for method in ("POST", "GET") if not given else ("POST",):
                answer = asked(port, request(path, given, b"", method))
                if not served_nothing(answer):
                    got[f"{method} {path} with headers {number}"] = answer
        if answer := asked(port, request(path), tls=False):
            got[f"POST {path} without TLS"] = answer
    for name, text in {
        "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "noise": b"\x00\xff" * 400,
        "gRPC": b"\x16\x03" * 9,
    }.items():
        if not served_nothing(answer := asked(port, text)):
            got[name] = answer
    return got


def served_nothing(answer: bytes) -> bool:
    return answer == b"" or (answer.startswith(b"HTTP/1.1 404 ") and answer.endswith(b"\r\n\r\n"))
