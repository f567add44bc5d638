"""The server's folder: certificates that TLS accepts, for the host alone; keys that belong to one number for ever."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.deploy.demo_network import ended_early
from fedveil.deploy.network_folder import (
    NetworkFolder,
    check_readable,
    make_client_key,
    make_network,
    open_network,
    public_key_of,
    signing_key,
)
from fedveil.deploy.programs import Program, ended_by_signal, require_free
from fedveil.errors import ConfigError, FedveilError
from fedveil.executors.interrupts import end_alike
from full_disk import FullDisk


def shake(network: NetworkFolder, authority: Path, host: str) -> None:
    """A TLS handshake in memory, as a client of that authority that calls the server by that name."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(*network.certificates)
    client.load_verify_locations(authority)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    one, other = client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)
    done: set[ssl.SSLObject] = set()
    for _ in range(10):
        for side in (one, other):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    assert done == {one, other}


@pytest.mark.parametrize("host", ["fl.example.org", "192.0.2.7"])
def test_tls_accepts_the_certificate_for_the_host_and_for_this_machine_alone(host: str, tmp_path: Path) -> None:
    network = make_network(tmp_path / "a", host, 9700)
    for name in (host, "127.0.0.1"):
        shake(network, network.authority, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake(network, network.authority, "other.example.org")
    foreign = make_network(tmp_path / "b", host, 9700)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get local issuer|signature failure"):
        shake(network, foreign.authority, host)


def test_what_is_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    network = make_network(tmp_path / "net", "localhost", 9700)
    make_client_key(tmp_path / "alice")
    secret = [network.path / name for name in ("ca.key", "server.key", "secret", "receipts.key")]
    assert {path.stat().st_mode & 0o777 for path in (*secret, tmp_path / "alice", tmp_path / "alice.signing")} == {0o600}
    assert network.path.stat().st_mode & 0o777 == 0o700
    assert open_network(network.path) == network
    with pytest.raises(ConfigError, match="holds a network already"):
        make_network(tmp_path / "net", "localhost", 9700)
    with pytest.raises(ConfigError, match="holds no network"):
        open_network(tmp_path)


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("fl.example.org:9700", 9700, "without a port"),
        ("a name", 9700, "without a port"),
        ("", 9700, "without a port"),
        ("fl.example.org", 99999, "from 1 to 65535"),
        ("fl.example.org", 0, "from 1 to 65535"),
    ],
)
def test_a_host_or_port_that_is_none_makes_no_folder(host: str, port: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        make_network(tmp_path / "net", host, port)
    assert not (tmp_path / "net").exists()


@pytest.mark.parametrize(
    ("authority", "key", "said"),
    [
        ("alice", "alice", "--ca .*alice is no certificate"),
        ("net/ca.pem", "alice.pub", "--key .*alice.pub is no private key"),
        ("net/ca.pem", "net/ca.pem", "--key .*ca.pem is no private key"),
        ("net/ca.pem", "other", "--key .*other: Flower wants an elliptic-curve key"),
    ],
)
def test_files_with_which_no_client_could_join_are_refused_at_once(authority: str, key: str, said: str, tmp_path: Path) -> None:
    make_network(tmp_path / "net", "localhost", 9700)
    make_client_key(tmp_path / "alice")
    other = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "other").write_bytes(other)
    check_readable(tmp_path / "net/ca.pem", tmp_path / "alice")
    with pytest.raises(ConfigError, match=said):
        check_readable(tmp_path / authority, tmp_path / key)


@pytest.mark.parametrize("there", ["alice", "alice.pub", "alice.signing"])
def test_a_key_is_never_overwritten(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("a key")
    with pytest.raises(ConfigError, match=rf"{there} exists, .* join with --key .*alice as it is, or give another name"):
        make_client_key(tmp_path / "alice")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, "a key")]


def test_the_roster_has_the_signing_keys_and_an_older_key_gets_one(tmp_path: Path) -> None:
    network = make_network(tmp_path / "net", "localhost", 9700)
    for name in ("alice", "bob"):
        make_client_key(tmp_path / name)
    flowers = (tmp_path / "bob.pub").read_bytes().split(b"\n")[0] + b"\n"
    (tmp_path / "bob.pub").write_bytes(flowers)  # as of an earlier version
    (tmp_path / "bob.signing").unlink()
    assert [network.admit(tmp_path / f"{name}.pub") for name in ("alice", "bob")] == [0, 1]
    with pytest.raises(ConfigError, match="bob: no signing key"):
        _ = network.roster
    assert signing_key(tmp_path / "bob") is None
    make_client_key(tmp_path / "bob")
    assert (tmp_path / "bob.pub").read_bytes().startswith(flowers)
    assert network.admit(tmp_path / "bob.pub") == 1
    with pytest.raises(ConfigError, match="already admitted, as client 1"):
        network.admit(tmp_path / "bob.pub")
    own = {number: signing_key(tmp_path / name) for number, name in ((0, "alice"), (1, "bob"))}
    assert network.roster.keys == {number: key.public_key().public_bytes_raw() for number, key in own.items() if key}
    assert [client.name for client in network.roster.clients] == ["alice", "bob"]


def test_the_command_writes_the_roster_and_prints_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    network = make_network(tmp_path / "network", "localhost", 9700)
    make_client_key(tmp_path / "alice")
    network.admit(tmp_path / "alice.pub")
    printed = CliRunner().invoke(app, ["net", "roster"])
    assert printed.exit_code == 0, printed.output
    assert network.roster.digest.hex() in printed.output
    assert (tmp_path / "roster.toml").read_text() == network.roster.text


def test_how_a_client_ended_is_said_with_what_it_printed_last(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a\nb\nc\nMemoryError\n")
    assert ended_early(3, 7, tmp_path / "log") == "client 3 ended with exit status 7 before the run did: b | c | MemoryError"
    (tmp_path / "log").write_text("")
    assert ended_early(0, -9, tmp_path / "log") == "client 0 ended by signal 9 (SIGKILL) before the run did: it printed nothing"


def test_a_number_belongs_to_its_key(tmp_path: Path) -> None:
    network = make_network(tmp_path / "net", "localhost", 9700)
    for number, name in enumerate(("alice", "bob")):
        make_client_key(tmp_path / name)
        assert network.admit(tmp_path / f"{name}.pub") == number
    with pytest.raises(ConfigError, match="already admitted, as client 0"):
        network.admit(tmp_path / "alice.pub")
    assert [public_key_of(path) for path in network.admitted().values()] == [
        public_key_of(tmp_path / f"{name}.pub") for name in ("alice", "bob")
    ]
    with pytest.raises(ConfigError, match=r"no public key .* ends in \.pub"):
        network.admit(tmp_path / "alice")


def test_why_a_program_ended_is_one_line(tmp_path: Path) -> None:
    program = Program(["flower-supernode"], tmp_path, tmp_path / "log")
    program.log.write_text(
        "INFO: up\n\x1b[91mERROR \x1b[0m: Exit Code: 305\nAll SuperNodes must\nbe registered.\n\nFor more information, visit: x\n"
    )
    assert program.why() == "exit 305, All SuperNodes must be registered."
    program.log.write_text("a\nb\nc\nd\n")
    assert program.why() == "b | c | d"


def test_a_port_that_another_program_has_is_refused_in_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            FedveilError, match=rf"port {port} of this machine cannot be used \(Address already in use\): end what"
        ):
            require_free("127.0.0.1", port, patience=0.0)
    require_free("127.0.0.1", port)


def attempts(folder: Path, act: Callable[[], object]) -> None:
    """Each moment at which the disk may be full: the error names the file, nothing half is left, and a second try succeeds."""
    number = 0
    while True:
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        failed: OSError | None = None
        with FullDisk(folder, fails=number) as disk:
            try:
                act()
            except OSError as problem:
                failed = problem
        if failed is None:
            assert number >= 2
            return
        assert str(folder) in str(failed.filename), disk.points
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before, disk.points
        number += 1


def test_a_full_disk_leaves_no_half_of_a_network_or_key_and_names_the_file(tmp_path: Path) -> None:
    attempts(tmp_path, lambda: make_network(tmp_path / "net", "localhost", 9700))
    network = open_network(tmp_path / "net")
    shake(network, network.authority, "localhost")
    attempts(tmp_path, lambda: make_client_key(tmp_path / "alice"))
    attempts(tmp_path, lambda: network.admit(tmp_path / "alice.pub"))
    assert network.admitted() == {0: tmp_path / "net/clients/0000-alice.pub"}


def test_a_network_is_made_in_a_new_folder_or_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert make_network(tmp_path / "empty", "localhost", 9700) == open_network(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/ca.key").write_text("somebody's own")
    with pytest.raises(ConfigError, match="holds other files"):
        make_network(tmp_path / "other", "localhost", 9700)
    (tmp_path / "killed.part").mkdir()
    (tmp_path / "killed.part/ca.key").write_text("half")
    assert make_network(tmp_path / "killed", "localhost", 9700).authority.exists()
    assert not (tmp_path / "killed.part").exists()


@pytest.mark.heavy
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system limits memory on Linux alone")
def test_a_program_gets_no_more_memory_than_it_may_have(tmp_path: Path) -> None:
    name = Path(sys.executable).name
    for size, status in ((2**20, 0), (2**30, 1)):
        program = Program([name, "-c", f"bytearray({size})"], tmp_path, tmp_path / "log", "a program", memory=2**29)
        program.start()
        assert program.process is not None
        assert program.process.wait(60) == status
        program.stop()
    assert "MemoryError" in (tmp_path / "log").read_text()


def test_a_request_to_terminate_ends_a_server_with_its_own_exit_status() -> None:
    """`serve` took it for Ctrl-C and exited 130, where the systemd unit counts on 143."""
    with end_alike() as signals, pytest.raises(KeyboardInterrupt), ended_by_signal():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert [128 + number for number in signals] == [143]
