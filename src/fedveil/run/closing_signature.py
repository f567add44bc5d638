"""A run's closing digest, signed with an SSH key by `ssh-keygen -Y`: `closing.sig`, whose first line is what is signed.

Anybody can check it without fedveil: `head -n 1 RUN/closing.sig | ssh-keygen -Y verify -n fedveil-run -f SIGNERS -I NAME -s
<(tail -n +2 RUN/closing.sig)`.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from fedveil.errors import FedveilError
from fedveil.run.run_directory import write_text
from fedveil.verify import Finding, verify_run

SIGNATURE = "closing.sig"
NAMESPACE = "fedveil-run"
SUBJECT = "signature"


class Signer(NamedTuple):
    """Who is to have signed: a name, and the allowed_signers file (see ssh-keygen) that says which keys are that person's."""

    identity: str
    allowed: Path


def sign_run(run: Path, key: Path) -> Path:
    """Write `closing.sig` into a run directory and return its path.

    Args:
        key: a private key, or the .pub file of a key that ssh-agent holds.

    Raises:
        FedveilError: nothing to sign, something contradicted, a signature already there, ssh-keygen refuses, or no room.
    """
    target = run / SIGNATURE
    if target.exists():
        raise FedveilError(f"{target} exists: a run is signed once; move the signature away to sign anew")
    found = verify_run(run)
    wrong = [f"{f.subject}: {f.text}" for f in found.findings if f.kind == "contradicted"]
    if wrong:
        raise FedveilError(f"{run} contradicts itself, so it is not signed: {'; '.join(wrong)}")
    if not found.closing:
        raise FedveilError(f"{run} has no closed ledger that can be read, so there is no closing digest to sign")
    message = f"{found.closing}\n"
    signed = _ssh_keygen(["sign", "-f", str(key), "-n", NAMESPACE], message)
    if signed.returncode:
        raise FedveilError(f"ssh-keygen cannot sign with {key}: {_last_line(signed.stderr)}")
    try:
        write_text(target, message + signed.stdout)
    except OSError as problem:
        raise FedveilError(f"cannot write {target}: {problem.strerror}; make room and sign again") from problem
    return target


def check_signature(run: Path, closing: str, signer: Signer | None) -> Finding | None:
    """What `closing.sig` of a run directory says; None where there is none and none is asked for.

    Args:
        closing: the closing digest that the ledger has.

    Raises:
        FedveilError: the file of allowed signers cannot be read, or there is no ssh-keygen.
    """
    if signer is not None and not signer.allowed.is_file():
        raise FedveilError(
            f"--signers {signer.allowed}: there is no such file; it is an allowed_signers file as ssh-keygen reads it"
        )
    try:
        text = (run / SIGNATURE).read_bytes().decode("ascii")
    except FileNotFoundError:
        return None if signer is None else Finding("unknown", SUBJECT, f"there is no {SIGNATURE}: nobody signed this run")
    except (OSError, UnicodeDecodeError) as problem:
        return Finding("contradicted", SUBJECT, f"{SIGNATURE} is not what `fedveil sign` writes ({problem})")
    digest, _, armoured = text.partition("\n")
    if digest != closing:
        return Finding("contradicted", SUBJECT, f"expected one of {closing or 'a closed ledger'}, found one of {digest[:64]}")
    if signer is None:
        return Finding("trust", SUBJECT, "signed, not checked: give --signers FILE --identity NAME")
    with tempfile.NamedTemporaryFile("w", prefix="fedveil-", suffix=".sig", encoding="utf-8") as file:
        file.write(armoured)
        file.flush()
        options = ["verify", "-f", str(signer.allowed), "-I", signer.identity, "-n", NAMESPACE, "-s", file.name]
        checked = _ssh_keygen(options, f"{digest}\n")
    if checked.returncode:
        why = _last_line(checked.stderr or checked.stdout)
        return Finding("contradicted", SUBJECT, f"expected one by {signer.identity}, but ssh-keygen says: {why}")
    return Finding("verified", SUBJECT, _last_line(checked.stdout))


def _ssh_keygen(options: list[str], message: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["ssh-keygen", "-Y", *options], input=message, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FedveilError("signatures need ssh-keygen, which is not on PATH: install OpenSSH's client") from None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
