"""What the server's operator has on disk: the authority, the server's certificate, and who was admitted.

ca.pem              given to every client        ca.key, server.pem, server.key, secret   given to nobody
network.json        host and port                clients/0000-alice.pub                   client 0 is who has this key
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.ledger.owner_only import owner_only_folder
from fedveil.ledger.whole_files import DRAFT, replace_whole
from fedveil.network.certificates import AUTHORITY, SERVER, SERVER_KEY, make_authority, make_server, public_key_of

_FILE, _SECRET, _CLIENTS = "network.json", "secret", "clients"
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")
"""A name, an address of version 4, or one of version 6."""


@dataclass(frozen=True)
class NetworkFolder:
    """An existing folder. host, port: where clients reach the server."""

    path: Path
    host: str
    port: int

    @property
    def authority(self) -> Path:
        """The certificate of the authority, which clients get."""
        return self.path / AUTHORITY

    @property
    def certificates(self) -> tuple[Path, Path]:
        """The server's certificate and key."""
        return self.path / SERVER, self.path / SERVER_KEY

    @property
    def secret(self) -> Path:
        """What shows the server's own process to its SuperLink."""
        return self.path / _SECRET

    @property
    def address(self) -> str:
        """Where the server listens: on this machine alone where nobody else is meant."""
        return "0.0.0.0" if self.host not in ("127.0.0.1", "localhost") else "127.0.0.1"

    def admitted(self) -> dict[int, Path]:
        """The public key file of each client."""
        return {int(path.name.split("-")[0]): path for path in sorted((self.path / _CLIENTS).glob("*.pub"))}

    def admit(self, key: Path) -> int:
        """Admit the client with this public key; returns its number, which is its own from now on.

        Raises:
            ConfigError: it is no key, or it was admitted before.
        """
        found, there = public_key_of(key), self.admitted()
        for number, path in there.items():
            if public_key_of(path) == found:
                raise ConfigError(f"{key}: admitted before, as client {number}")
        number = max(there, default=-1) + 1
        replace_whole(owner_only_folder(self.path / _CLIENTS) / f"{number:04d}-{key.name}", key.read_bytes(), private=True)
        return number


def make_network(path: Path, host: str, port: int) -> NetworkFolder:
    """Make the folder of a new network, whole or not at all.

    Args:
        host: name or address at which clients reach the server; the certificate is for it.

    Raises:
        ConfigError: there is one already, or another folder with files; or it is no name or address, or no port.
        OSError: it cannot be written.
    """
    if not _HOST.fullmatch(host):
        raise ConfigError(f"--host {host!r}: a name or address without a port, such as fl.example.org or 192.0.2.7")
    if not 0 < port < 65536:
        raise ConfigError(f"--port {port}: a port is a number from 1 to 65535")
    if (path / _FILE).exists():
        raise ConfigError(f"{path} holds a network already: admit clients to it, or choose another --dir")
    if path.exists() and next(path.iterdir(), None) is not None:
        raise ConfigError(f"{path} holds other files: choose another --dir, a new folder or an empty one")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.absolute().with_name(path.absolute().name + DRAFT)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        owner_only_folder(draft)
        make_authority(draft)
        make_server(draft, host)
        replace_whole(draft / _SECRET, secrets.token_bytes(32), private=True)
        replace_whole(draft / _FILE, json.dumps({"host": host, "port": port}).encode(), private=True)
        draft.rename(path)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return NetworkFolder(path, host, port)


def open_network(path: Path) -> NetworkFolder:
    """The network in a folder; raises ConfigError if there is none."""
    try:
        found = json.loads((path / _FILE).read_text(encoding="utf-8"))
        return NetworkFolder(path, str(found["host"]), int(found["port"]))
    except (OSError, ValueError, KeyError) as problem:
        raise ConfigError(f"{path} holds no network ({problem}): make one with fedveil net init --host NAME") from None
