"""Keys, certificates, and the server operator's folder with the admitted clients.

ca.pem              given to every client        ca.key, server.pem, server.key, secret, receipts.key   given to nobody
network.json        host and port                clients/0000-alice.pub                                 public key of client 0
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedveil.errors import ConfigError
from fedveil.ledger.files import DRAFT, owner_only_folder, replace_whole
from fedveil.secure_aggregation.roster import Roster, RosterClient

AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
SIGNING = ".signing"

_AUTHORITY_DAYS, SERVER_DAYS = 3650, 365


def make_authority(folder: Path) -> None:
    """Write an authority into the folder: `ca.pem` for every client, and `ca.key`, which stays secret."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedveil authority")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    made = _signed(name, name, key.public_key(), key, _AUTHORITY_DAYS, [(x509.BasicConstraints(True, 0), True), (usage, True)])
    _write_private(folder / AUTHORITY_KEY, key)
    replace_whole(folder / AUTHORITY, made.public_bytes(Encoding.PEM))


def make_server(folder: Path, host: str, days: int = SERVER_DAYS) -> None:
    """Write a key and a certificate for a server with that name or address, signed by the folder's authority, for `days`."""
    authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    signer = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / AUTHORITY_KEY} is no key that fedveil net init made")
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    names = [_general(host), *([] if host == "127.0.0.1" else [_general("127.0.0.1")])]
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectAlternativeName(names), False),
        (x509.BasicConstraints(False, None), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
    ]
    made = _signed(name, authority.subject, key.public_key(), signer, days, extensions)
    _write_private(folder / SERVER_KEY, key)
    replace_whole(folder / SERVER, made.public_bytes(Encoding.PEM))


def make_client_key(path: Path) -> None:
    """Write a key pair in Flower's format: the private key at `path`, the public one next to it with the ending .pub.

    With it comes a pair of Ed25519, by which the client signs what it masks: the private key with the ending .signing, the public
    one as the second line of .pub. A pair of an earlier version gets one.

    Raises:
        ConfigError: one of the files exists.
    """
    public_path, signing_path = path.with_name(path.name + ".pub"), path.with_name(path.name + SIGNING)
    if path.exists() and public_path.exists() and not signing_path.exists() and signing_line(public_path) is None:
        _write_signing(signing_path, public_path)
        return
    if existing := next((p for p in (path, public_path, signing_path) if p.exists()), None):
        raise ConfigError(
            f"{existing} exists, and a key is never overwritten, for the server knows its client by it: join with --key {path} "
            f"as it is, or give another name"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    replace_whole(public_path, public + b" " + path.name.encode() + b"\n")
    try:
        replace_whole(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), private=True)
        _write_signing(signing_path, public_path)
    except OSError:
        for made in (public_path, path, signing_path):
            made.unlink(missing_ok=True)
        raise


def _write_signing(path: Path, public_path: Path) -> None:
    """Write a signing key, and its public half below Flower's."""
    key = ed25519.Ed25519PrivateKey.generate()
    _write_private(path, key)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    replace_whole(public_path, public_path.read_bytes().rstrip() + b"\n" + public + b" " + path.name.encode() + b"\n")


def signing_key(path: Path) -> ed25519.Ed25519PrivateKey | None:
    """Return the signing key of the client whose key for Flower is at `path`, or None if it has none.

    Raises:
        ConfigError: the file is no such key.
    """
    signing = path.with_name(path.name + SIGNING)
    return _ed25519_key(signing) if signing.exists() else None


def signing_line(path: Path) -> bytes | None:
    """Return the signing key in a client's .pub, 32 raw bytes, or None if it has none; raise ConfigError if it is damaged."""
    try:
        lines = path.read_bytes().split(b"\n")
        key = load_ssh_public_key(lines[1]) if len(lines) > 1 and lines[1].strip() else None
    except (OSError, ValueError, UnsupportedAlgorithm) as problem:
        raise ConfigError(f"{path} is no public key ({problem}): give the file that ends in .pub") from None
    return key.public_bytes_raw() if isinstance(key, ed25519.Ed25519PublicKey) else None


def _ed25519_key(path: Path) -> ed25519.Ed25519PrivateKey:
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"{path} is no signing key that fedveil made: put its copy back")
    return key


def public_key_of(path: Path) -> bytes:
    """Return a client's public key, in the form by which Flower identifies its node.

    Raises:
        ConfigError: the file is not a public key.
    """
    try:
        key = load_ssh_public_key(path.read_bytes().split(b"\n")[0])
    except (OSError, ValueError, UnsupportedAlgorithm) as problem:
        raise ConfigError(f"{path} is no public key ({problem}): give the file that ends in .pub") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path}: Flower wants an elliptic-curve key: make one with fedveil net key NAME")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def check_readable(authority: Path, key: Path) -> None:
    """Check that Flower can use a client's two files; with others it would be turned away forever.

    Raises:
        ConfigError: one of them is something else.
    """
    try:
        x509.load_pem_x509_certificate(authority.read_bytes())
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--ca {authority} is no certificate ({problem}): give the server's ca.pem") from None
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as problem:
        raise ConfigError(f"--key {key} is no private key without a password ({problem}): give NAME of fedveil net key") from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"--key {key}: Flower wants an elliptic-curve key: make one with fedveil net key NAME")


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    extensions: list[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384())


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> None:
    replace_whole(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), private=True)


_FILE, _SECRET, CLIENTS, _RECEIPTS = "network.json", "secret", "clients", "receipts.key"
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")
"""Pattern of a host name, an IPv4 address or an IPv6 address."""


@dataclass(frozen=True)
class NetworkFolder:
    """An existing network folder. host, port: at which clients reach the server."""

    path: Path
    host: str
    port: int

    @property
    def authority(self) -> Path:
        """Return the certificate of the authority, which clients get."""
        return self.path / AUTHORITY

    @property
    def certificates(self) -> tuple[Path, Path]:
        """Return the server's certificate and key."""
        return self.path / SERVER, self.path / SERVER_KEY

    @property
    def secret(self) -> Path:
        """Return the secret by which the SuperLink recognises the server's own process."""
        return self.path / _SECRET

    @property
    def receipt_key(self) -> ed25519.Ed25519PrivateKey:
        """Return the key by which the server signs receipts; a folder of an earlier version gets one.

        Raises:
            ConfigError: the file is no such key.
        """
        path = self.path / _RECEIPTS
        if not path.exists():
            _write_private(path, ed25519.Ed25519PrivateKey.generate())
        return _ed25519_key(path)

    @property
    def address(self) -> str:
        """Return the address at which the server listens: this machine only, if the host is this machine."""
        return "0.0.0.0" if self.host not in ("127.0.0.1", "localhost") else "127.0.0.1"

    def admitted(self) -> dict[int, Path]:
        """Return the public key file of each client."""
        return dict(_numbered(self.path / CLIENTS))

    def removed(self) -> list[tuple[int, Path]]:
        """Return number and public key file of each key that is no longer admitted."""
        return _numbered(self.path / CLIENTS / "removed")

    @property
    def roster(self) -> Roster:
        """Return number, name and signing key of all admitted clients.

        Raises:
            ConfigError: one of them has no signing key.
        """
        admitted = self.admitted()
        keys = {number: signing_line(path) for number, path in admitted.items()}
        names = {number: path.stem.partition("-")[2] for number, path in admitted.items()}
        if without := [names[number] for number, key in keys.items() if key is None]:
            raise ConfigError(
                f"{', '.join(without)}: no signing key, which secure aggregation needs: on that machine run fedveil net key NAME "
                f"again, which adds one, and admit its .pub again"
            )
        return Roster(tuple(RosterClient(number, names[number], key) for number, key in keys.items() if key))

    def admit(self, key: Path) -> int:
        """Admit the client with this public key, and return its permanent number.

        A client that was removed gets its number back, and one that was admitted without a signing key keeps its when it
        comes with one.

        Raises:
            ConfigError: the file is not a key, the key was admitted before, or its client has another one now.
        """
        public, signing, admitted, removed = public_key_of(key), signing_line(key), self.admitted(), self.removed()
        for client, path in admitted.items():
            if public_key_of(path) == public:
                if signing is None or signing_line(path) is not None:
                    raise ConfigError(f"{key}: already admitted, as client {client}")
                replace_whole(path, key.read_bytes(), private=True)
                return client
        earlier = next((n for n, path in removed if public_key_of(path) == public), None)
        if earlier in admitted:
            raise ConfigError(f"{key}: an earlier key of client {earlier}, which has another one now")
        number = max([*admitted, *dict(removed)], default=-1) + 1 if earlier is None else earlier
        replace_whole(owner_only_folder(self.path / CLIENTS) / f"{number:04d}-{key.name}", key.read_bytes(), private=True)
        return number


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return the public key files in a folder, each with the number at the beginning of its name."""
    return [(int(path.name.split("-")[0]), path) for path in sorted(folder.glob("*.pub"))]


def make_network(path: Path, host: str, port: int) -> NetworkFolder:
    """Create the folder of a new network, atomically.

    Args:
        host: name or address at which clients reach the server; the certificate is issued for it.

    Raises:
        ConfigError: the folder exists with a network or other files; or the host or port is invalid.
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
        _write_private(draft / _RECEIPTS, ed25519.Ed25519PrivateKey.generate())
        replace_whole(draft / _FILE, json.dumps({"host": host, "port": port}).encode(), private=True)
        draft.rename(path)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return NetworkFolder(path, host, port)


def open_network(path: Path) -> NetworkFolder:
    """Return the network in a folder; raise ConfigError if it has none."""
    try:
        fields = json.loads((path / _FILE).read_text(encoding="utf-8"))
        return NetworkFolder(path, str(fields["host"]), int(fields["port"]))
    except (OSError, ValueError, KeyError) as problem:
        raise ConfigError(f"{path} holds no network ({problem}): make one with fedveil net init --host NAME") from None
