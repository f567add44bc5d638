"""The clients and certificates of a network over the years: removal, new keys, renewal, expiry, and when each was seen.

clients/0001-bob.pub           public key of client 1      clients/removed/0001-bob.pub   a key that is admitted no more
seen.json                      when each client was online last, and its version of fedveil
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509

from fedveil.deploy.network_folder import CLIENTS, SERVER_DAYS, NetworkFolder, make_authority, make_server, public_key_of
from fedveil.errors import ConfigError
from fedveil.ledger.files import owner_only_folder, replace_whole

WARNING_DAYS = 30
"""Days before the end of a certificate from which on it is reported."""
_DAY = 86400.0


def end_of(certificate: Path) -> float:
    """Return the time at which a certificate ends, in seconds since 1970."""
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{certificate} is no certificate ({problem}): restore it, or make a new one with fedveil net renew"
        ) from None


def expiry(certificate: Path, remedy: str, now: float | None = None) -> str:
    """Return a warning if a certificate ends within WARNING_DAYS, else an empty string.

    Args:
        remedy: what to do about it. now: seconds since 1970; by default the current time.

    Raises:
        ConfigError: it has ended.
    """
    end = end_of(certificate)
    left, day = end - (time.time() if now is None else now), f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M} UTC"
    if left <= 0:
        raise ConfigError(f"the certificate {certificate} ended on {day}, and no client connects with it: {remedy}")
    return (
        f"the certificate {certificate} ends on {day}, in {left / _DAY:.0f} days: {remedy}" if left < WARNING_DAYS * _DAY else ""
    )


def server_expiry(network: NetworkFolder, now: float | None = None) -> list[str]:
    """Return a warning for each certificate of a network that ends soon; raise as `expiry`."""
    server = "fedveil net renew makes a new one, which clients accept as they are"
    authority = "fedveil net renew --authority makes a new one, which every client needs"
    checked = (expiry(network.certificates[0], server, now), expiry(network.authority, authority, now))
    return [line for line in checked if line]


def renew(network: NetworkFolder, *, authority: bool = False, days: int = SERVER_DAYS) -> None:
    """Replace the server's certificate and key.

    Args:
        authority: replace the authority, too, so that each client needs its `ca.pem`.
    """
    if authority:
        make_authority(network.path)
    make_server(network.path, network.host, days)


@dataclass(frozen=True)
class NetworkClient:
    """A client of a network.

    fingerprint: of its key, as ssh-keygen prints it. admitted: day. seen: when it was online last, or "". removed: its key is no
    longer admitted, and its number stays its own.
    """

    number: int
    name: str
    fingerprint: str
    admitted: str
    seen: str
    fedveil: str
    removed: bool


def members(network: NetworkFolder) -> list[NetworkClient]:
    """Return the clients of a network by number, removed ones included."""
    seen, admitted = read_seen(network), network.admitted()
    keys = {**dict(network.removed()), **admitted}
    return [_member(number, keys[number], seen.get(str(number), {}), number not in admitted) for number in sorted(keys)]


def _member(number: int, path: Path, seen: Mapping[str, Any], removed: bool) -> NetworkClient:
    blob = base64.b64decode(path.read_bytes().split()[1])
    fingerprint = "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    day = f"{datetime.fromtimestamp(path.stat().st_mtime, UTC):%Y-%m-%d}"
    name = path.stem.partition("-")[2]
    return NetworkClient(number, name, fingerprint, day, seen.get("seen", ""), seen.get("fedveil", ""), removed)


def remove(network: NetworkFolder, number: int) -> None:
    """Admit a client no more; its number is given to nobody else."""
    path = _admitted_as(network, number)
    folder, copies = owner_only_folder(path.parent / "removed"), 0
    while (away := folder / (path.name if not copies else f"{path.stem}~{copies}.pub")).exists():
        copies += 1
    path.rename(away)


def rotate(network: NetworkFolder, number: int, key: Path) -> None:
    """Give a client's number to its new public key, and admit the old one no more.

    Raises:
        ConfigError: no client has that number, or the key is no key or is, or was, a client's.
    """
    new = public_key_of(key)
    for other, path in [*network.removed(), *network.admitted().items()]:
        if public_key_of(path) == new:
            raise ConfigError(f"{key}: already a key of client {other}; make a new one with fedveil net key NAME")
    remove(network, number)
    replace_whole(network.path / CLIENTS / f"{number:04d}-{key.name}", key.read_bytes(), private=True)


def _admitted_as(network: NetworkFolder, number: int) -> Path:
    admitted = network.admitted()
    if number not in admitted:
        there = ", ".join(map(str, admitted)) or "none"
        raise ConfigError(f"client {number}: no such client is admitted; there are {there} (fedveil net list)")
    return admitted[number]


def _seen_path(network: NetworkFolder) -> Path:
    return network.path / "seen.json"


def read_seen(network: NetworkFolder) -> dict[str, dict[str, str]]:
    """Return when each client was online last, and its version, by number; empty if that is not known."""
    try:
        content = json.loads(_seen_path(network).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class SeenClients:
    """Record of when each client was online last, written once a minute, and when a client comes, goes or tells its version.

    Args:
        versions: of fedveil, of the clients that have told it. clock: returns seconds since 1970.
    """

    def __init__(self, network: NetworkFolder, versions: Mapping[int, str], clock: Callable[[], float] = time.time) -> None:
        self._network, self._versions, self._clock = network, versions, clock
        self._seen, self._written = read_seen(network), -math.inf
        self._online: dict[int, str] = {}

    def note(self, clients: Iterable[int]) -> None:
        """Note that these clients are online; a full disk loses the note alone."""
        now, online = self._clock(), {client: self._versions.get(client, "") for client in clients}
        if online == self._online and now - self._written < 60.0:
            return
        day = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC"
        for client, version in online.items():
            before = self._seen.get(str(client), {}).get("fedveil", "")
            self._seen[str(client)] = {"seen": day, "fedveil": version or before}
        with suppress(OSError):
            replace_whole(_seen_path(self._network), json.dumps(self._seen, indent=1).encode(), private=True)
        self._online, self._written = online, now
