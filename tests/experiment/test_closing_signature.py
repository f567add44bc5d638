"""Closing digests signed and checked by the real ssh-keygen."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedveil.errors import FedveilError
from fedveil.experiment.published_copy import publish
from fedveil.experiment.verification import SIGNATURE, Signer, check_signature, sign_run, verification
from fedveil.verify import Finding
from finished_runs import finished

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen: OpenSSH's client is not installed"),
]


def new_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """alice and bob, and the file that says whose keys they are."""
    folder = tmp_path_factory.mktemp("keys")
    lines = [f"{name} {new_key(folder / name).with_suffix('.pub').read_text()}" for name in ("alice", "bob")]
    (folder / "signers").write_text("".join(lines))
    return folder


@pytest.fixture
def signed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Path:
    run = finished(tmp_path_factory, tmp_path)
    sign_run(run, keys / "alice")
    return run


def found(run: Path, signer: Signer | None) -> Finding:
    (finding,) = (f for f in verification(run, signer=signer).findings if f.subject == "signature")
    return finding


def test_a_signature_is_checked_against_its_signer(signed: Path, keys: Path) -> None:
    good = found(signed, Signer("alice", keys / "signers"))
    assert good.kind == "verified"
    assert "for alice with ED25519 key" in good.text
    assert verification(signed, signer=Signer("alice", keys / "signers")).outcome == "verified"
    assert found(signed, None) == ("trust", "signature", "signed, not checked: give --signers FILE --identity NAME")
    digest, _, armoured = (signed / SIGNATURE).read_text().partition("\n")
    assert digest == verification(signed).closing
    assert armoured.startswith("-----BEGIN SSH SIGNATURE-----\n")


@pytest.mark.few(1)
@pytest.mark.parametrize("identity", ["bob", "carol", "-h", ""])
def test_another_identity_did_not_sign(identity: str, signed: Path, keys: Path) -> None:
    assert found(signed, Signer(identity, keys / "signers")).kind == "contradicted"


def _of_another_run(run: Path, other: Path, keys: Path) -> None:
    shutil.copy(sign_run(other, keys / "alice"), run / SIGNATURE)


def _another_digest(run: Path, other: Path, keys: Path) -> None:
    text = (run / SIGNATURE).read_text()
    (run / SIGNATURE).write_text(("1" if text[0] == "0" else "0") + text[1:])


def _armour_of_another_run(run: Path, other: Path, keys: Path) -> None:
    digest = (run / SIGNATURE).read_text().partition("\n")[0]
    (run / SIGNATURE).write_text(f"{digest}\n{sign_run(other, keys / 'alice').read_text().partition(chr(10))[2]}")


def _other_namespace(run: Path, other: Path, keys: Path) -> None:
    digest = (run / SIGNATURE).read_text().partition("\n")[0] + "\n"
    command = ["ssh-keygen", "-Y", "sign", "-f", str(keys / "alice"), "-n", "git"]
    signed = subprocess.run(command, input=digest, capture_output=True, text=True, check=True)
    (run / SIGNATURE).write_text(digest + signed.stdout)


def _no_text(run: Path, other: Path, keys: Path) -> None:
    (run / SIGNATURE).write_bytes(b"\xff\x00")


CHANGES = (_of_another_run, _another_digest, _armour_of_another_run, _other_namespace, _no_text)


@pytest.mark.few(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_what_nobody_signed_is_contradicted(
    change: Callable[[Path, Path, Path], None], signed: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    change(signed, finished(tmp_path_factory, signed.parent, "other"), keys)
    assert found(signed, Signer("alice", keys / "signers")).kind == "contradicted"


def test_a_published_copy_carries_the_signature(signed: Path, keys: Path) -> None:
    copy = publish(signed, signed.parent / "copy")
    assert verification(copy).closing == verification(signed).closing
    assert found(copy, Signer("alice", keys / "signers")).kind == "verified"
    assert verification(copy).outcome == "verified"


def test_the_signature_is_gone(signed: Path, keys: Path) -> None:
    (signed / SIGNATURE).unlink()
    checked = verification(signed, signer=Signer("alice", keys / "signers"))
    assert (checked.outcome, checked.findings[-1].text) == ("cannot tell", "there is no closing.sig: nobody signed this run")
    assert check_signature(signed, checked.closing, None) is None


def test_what_is_not_signed(signed: Path, keys: Path, tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match="is signed once"):
        sign_run(signed, keys / "alice")
    (signed / SIGNATURE).unlink()
    with pytest.raises(FedveilError, match=r"cannot sign with .*absent"):
        sign_run(signed, tmp_path / "absent")
    with pytest.raises(FedveilError, match=r"--signers .*absent: there is no such file"):
        verification(signed, signer=Signer("alice", tmp_path / "absent"))
    (signed / "statement.md").write_text("forged")
    with pytest.raises(FedveilError, match="contradicts itself, so it is not signed: files"):
        sign_run(signed, keys / "alice")
    with pytest.raises(FedveilError, match="no closed ledger"):
        sign_run(Path(__file__).parent / "data" / "aggregate-0.1", keys / "alice")
    assert not (signed / SIGNATURE).exists()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[dict[str, str]]:
    socket = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL) as process:
        while not socket.exists():
            assert process.poll() is None
        yield {"SSH_AUTH_SOCK": str(socket)}
        process.terminate()


def test_a_key_of_the_agent_signs(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, keys: Path, agent: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["ssh-add", "-q", str(keys / "bob")], env=os.environ | agent, check=True)
    monkeypatch.setenv("SSH_AUTH_SOCK", agent["SSH_AUTH_SOCK"])
    public = Path(shutil.copy(keys / "bob.pub", tmp_path))
    run = finished(tmp_path_factory, tmp_path)
    sign_run(run, public)
    assert found(run, Signer("bob", keys / "signers")).kind == "verified"
