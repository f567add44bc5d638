"""Bind the files of a run together, sign the last digest, and verify a run directory or an archive of one.

The opening is part of the ledger's first digest, the closing of its last; `fedveil verify` compares. What changes after the end
(reports, audits), what is secret and not shown (checkpoints, noise state) and the ledger itself are not covered.

A ledger may be published, and which private files there are tells of the data: failures.csv, that a client failed. So the closing
binds all of them by one digest, that of `private/digests.json`, which lists theirs and stays in the folder `private`.

Anybody can check it without fedveil: `head -n 1 RUN/closing.sig | ssh-keygen -Y verify -n fedveil-run -f SIGNERS -I NAME -s
<(tail -n +2 RUN/closing.sig)`.
"""

from __future__ import annotations

import hashlib
import stat
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fedveil.errors import ConfigError, FedveilError, LedgerError
from fedveil.experiment.recertify import recertify
from fedveil.experiment.run_directory import PRIVATE, SALT, json_text, private_folder, write_bytes, write_text
from fedveil.ledger.files import DRAFT
from fedveil.ledger.ledger import Ledger
from fedveil.verify import Finding, Verification, verify_run

FOLDERS = (".", PRIVATE)
"""Folders of a run directory whose files are bound."""
DIGESTS = f"{PRIVATE}/digests.json"
"""The digests of the private files that a run leaves after its opening."""
_UNBOUND = ("ledger.sqlite", ".", "noise-state", "report.html", "audits.json", "closing.sig")


def digests_of(run: Path) -> dict[str, str]:
    """SHA-256 of each file that is bound, by its path in the run directory.

    Private files are hashed behind the salt of the run, since their digests are published: training loss or label counts could
    be guessed, and a digest would confirm the guess, and with it a membership.
    """
    files = [file for folder in FOLDERS for file in sorted((run / folder).glob("*")) if file.is_file()]
    bound = [file for file in files if not file.name.startswith(_UNBOUND) and not file.name.endswith(DRAFT)]
    names = {file.relative_to(run).as_posix(): file for file in bound}
    salt = _salt(run)
    return {name: hashlib.sha256(salt * _private(name) + file.read_bytes()).hexdigest() for name, file in names.items()}


def _private(name: str) -> bool:
    return name.startswith(f"{PRIVATE}/")


def _salt(run: Path) -> bytes:
    """What is hashed before each private file."""
    salt = run / PRIVATE / SALT
    return salt.read_bytes() if salt.exists() else b""


def opening(run: Path, method: str) -> dict[str, Any]:
    """What a ledger says at its opening: the digests of the files that a run writes before it trains, whatever the data."""
    return {"method": method, "files": digests_of(run)}


def check_opening(run: Path) -> None:
    """Whether what was written at the opening is still there, before anything is added that can only be verified with it.

    Raises:
        LedgerError: a file is gone or changed; the message names it.
    """
    with Ledger.open(run / "ledger.sqlite") as ledger:
        opened, there = ledger.meta.get("files", {}), digests_of(run)
    if wrong := [name for name, digest in opened.items() if there.get(name) != digest]:
        raise LedgerError(
            f"{run} is not as the run left it: {', '.join(wrong)} changed or gone since its start, so nothing that it released "
            f"could be verified; put back what was there, then resume"
        )


def conclude(run: Path, rounds: int, ended: str, last: Mapping[str, bytes]) -> str:
    """Write DIGESTS and close the ledger over all that lies there since its opening; returns the closing digest, 64 hex digits.

    Args:
        rounds: number of finished rounds. ended: why the run stopped early, or an empty string.
        last: files that are written once the ledger is closed, so that they tell that the run has ended.

    Raises:
        LedgerError: it is closed over something else already.
    """
    with Ledger.open(run / "ledger.sqlite") as ledger:
        known = {*ledger.meta["files"], *last, DIGESTS}
        there = {name: digest for name, digest in digests_of(run).items() if name not in known}
        own = json_text({name: digest for name, digest in there.items() if _private(name)}).encode()
        files = {name: digest for name, digest in there.items() if not _private(name)}
        files |= {DIGESTS: hashlib.sha256(_salt(run) + own).hexdigest()}
        files |= {name: hashlib.sha256(content).hexdigest() for name, content in last.items()}
        content = {"files": dict(sorted(files.items())), "rounds": rounds, "ended": ended}
        if ledger.closing is None:
            private_folder(run)
            write_bytes(run / DIGESTS, own)
            return ledger.conclude(content)
        held, digest = ledger.closing
        if held != content:
            raise LedgerError(f"the ledger of {run} is closed over other files: move the run away and keep it as it is")
        return digest


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


MOST_BYTES, MOST_FILES = 4 << 30, 10_000
"""What is unpacked at most; a zip of a few kilobytes can hold petabytes."""
_BROKEN = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The run directory in a zip, for as long as it is needed.

    Raises:
        ConfigError: no zip, a broken one, one over the limits or with doubtful names, or not one run in it.
    """
    with tempfile.TemporaryDirectory(prefix="fedveil-run-") as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                _check(path, archive.infolist())
                archive.extractall(folder)
        except _BROKEN as problem:
            raise ConfigError(f"{path} is neither a run directory nor a zip of one ({problem})") from None
        ledgers = list(Path(folder).rglob("ledger.sqlite"))
        if len(ledgers) != 1:
            raise ConfigError(f"{path} holds {len(ledgers)} ledgers (ledger.sqlite): a zip of one run directory has one")
        yield ledgers[0].parent


def _check(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Refuse, before anything is written, what is too large, or what is not the same files to everybody who unpacks it."""
    size = sum(entry.file_size for entry in entries)
    if size > MOST_BYTES or len(entries) > MOST_FILES:
        raise ConfigError(
            f"{path} would unpack to {size:,} bytes in {len(entries):,} files, and at most {MOST_BYTES:,} bytes in "
            f"{MOST_FILES:,} files are unpacked: unpack it yourself and give the directory"
        )
    seen = set[str]()
    for entry in entries:
        name = PurePosixPath(entry.filename.replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or ":" in entry.filename or stat.S_ISLNK(entry.external_attr >> 16):
            raise ConfigError(f"{path} holds {entry.filename!r}, a link or a path out of its folder: nothing was unpacked")
        if (folded := str(name).casefold()) in seen:
            raise ConfigError(
                f"{path} holds {entry.filename!r} twice: nothing was unpacked, since programs differ in which they take"
            )
        seen.add(folded)


TITLES = {
    "contradicted": "Contradicted",
    "unknown": "Cannot tell",
    "verified": "Verified",
    "trust": "What has to be trusted",
}


def headline(name: str, found: Verification) -> str:
    """The outcome in one line."""
    counts = [(len(lines), kind) for kind, lines in lines_by_kind(found).items() if kind != "trust"]
    return f"{printable(name)}: {found.outcome} ({', '.join(f'{n} {TITLES[kind].lower()}' for n, kind in counts)})"


def lines_by_kind(found: Verification) -> dict[str, list[str]]:
    """The findings of each kind that occurs, a line each."""
    lines = {kind: [f"{printable(f.subject)}: {printable(f.text)}" for f in found.findings if f.kind == kind] for kind in TITLES}
    return {kind: some for kind, some in lines.items() if some}


def problems(found: Verification) -> list[str]:
    """What is contradicted, and what could not be checked, a line each."""
    return [
        f"{TITLES[kind].lower()}: {line}"
        for kind, lines in lines_by_kind(found).items()
        for line in lines
        if kind in ("contradicted", "unknown")
    ]


def printable(text: str) -> str:
    """A stranger's text on one line: what would move a cursor, turn the writing or start a line is shown as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def verification(
    path: str | Path,
    *,
    pin: str | None = None,
    signer: Signer | None = None,
    trust_plugins: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check a run directory, or a zip of one; nothing is written to it, and no code of it runs unless its plugins are trusted.

    Args:
        pin: the closing digest that is known from elsewhere. signer: who is to have signed it.
        trust_plugins: run plugins that the run names, at their recorded digests, to make the statement again.
        on_step: called with (rows of the ledger read, rows there).

    Raises:
        FedveilError: the signature is to be checked and cannot be.
    """
    if Path(path).is_dir():
        return _of_directory(Path(path), pin, signer, trust_plugins, on_step)
    try:
        with unpacked(Path(path)) as run:
            return _of_directory(run, pin, signer, trust_plugins, on_step)
    except ConfigError as problem:
        return Verification((Finding("unknown", "run", str(problem)),))


def verified_ledger(found: Verification) -> str:
    """The closing digest, if rows, chain and head are verified; else an empty string."""
    right = {finding.subject for finding in found.findings if finding.kind == "verified"}
    return found.closing if {"ledger", "head"} <= right else ""


def _of_directory(
    run: Path, pin: str | None, signer: Signer | None, trust_plugins: bool, on_step: Callable[[int, int], None] | None
) -> Verification:
    found = verify_run(run, pin=pin, on_step=on_step)
    if len(found.findings) == 1:  # it was not read at all, so nothing else of it is
        return found
    added = recertify(run, trust_plugins=trust_plugins) if (run / "statement.json").is_file() else []
    signature = check_signature(run, found.closing, signer)
    return Verification((*found.findings, *added, *([signature] if signature else [])), found.closing)
