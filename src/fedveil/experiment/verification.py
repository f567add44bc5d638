"""Binding of a run's files, signing of the last digest, and verification of a run directory or an archive of one.

The opening is part of the ledger's first digest, the closing of its last; `fedveil verify` compares them. Files that change after
the end (reports, audits), secret files (checkpoints, noise state) and the ledger itself are not covered.

A ledger may be published, but the list of private files reveals data: failures.csv, that a client failed. So the closing binds
all of them by one digest, that of `private/digests.json`, which lists their digests and stays in the folder `private`.

Anybody can check it without fedveil: `head -n 1 RUN/closing.sig | ssh-keygen -Y verify -n fedveil-run -f SIGNERS -I NAME -s
<(tail -n +2 RUN/closing.sig)`.
"""

from __future__ import annotations

import hashlib
import stat
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fedveil.errors import ConfigError, FedveilError, LedgerError
from fedveil.experiment.receipts import RECEIPTS, check_receipts, compare_receipts
from fedveil.experiment.recertify import recertify
from fedveil.experiment.run_directory import PRIVATE, SALT, json_text, private_folder, write_bytes, write_text
from fedveil.experiment.two_ledgers import compared
from fedveil.ledger.files import DRAFT
from fedveil.ledger.ledger import Ledger
from fedveil.verify import Finding, Verification, verify_ledger, verify_run

FOLDERS = (".", PRIVATE)
"""Folders of a run directory whose files are bound."""
DIGESTS = f"{PRIVATE}/digests.json"
"""File with the digests of the private files that a run writes after its opening."""
_UNBOUND = ("ledger.sqlite", ".", "noise-state", "report.html", "audits.json", "closing.sig", RECEIPTS)


def _digests_of(run: Path) -> dict[str, str]:
    """Return the SHA-256 of each bound file, by its path in the run directory.

    Private files are hashed after the salt of the run, because their digests are published: otherwise a digest would confirm a
    guess of training losses or label counts, and with it a membership.
    """
    files = [file for folder in FOLDERS for file in sorted((run / folder).glob("*")) if file.is_file()]
    bound = [file for file in files if not file.name.startswith(_UNBOUND) and not file.name.endswith(DRAFT)]
    names = {file.relative_to(run).as_posix(): file for file in bound}
    salt = _salt(run)
    return {name: hashlib.sha256(salt * _private(name) + file.read_bytes()).hexdigest() for name, file in names.items()}


def _private(name: str) -> bool:
    return name.startswith(f"{PRIVATE}/")


def _salt(run: Path) -> bytes:
    """Return the bytes hashed before each private file."""
    salt = run / PRIVATE / SALT
    return salt.read_bytes() if salt.exists() else b""


def opening(run: Path, method: str) -> dict[str, Any]:
    """Return the opening of a ledger: the digests of the files that a run writes before it trains, for any data."""
    return {"method": method, "files": _digests_of(run)}


def check_opening(run: Path) -> None:
    """Check that the files of the opening are unchanged, before anything is added that could only be verified with them.

    Raises:
        LedgerError: a file is missing or changed; the message names it.
    """
    with Ledger.open(run / "ledger.sqlite") as ledger:
        opened, now = ledger.meta.get("files", {}), _digests_of(run)
    if wrong := [name for name, digest in opened.items() if now.get(name) != digest]:
        raise LedgerError(
            f"{run} is not as the run left it: {', '.join(wrong)} changed or gone since its start, so nothing that it released "
            f"could be verified; put back what was there, then resume"
        )


def conclude(run: Path, rounds: int, ended: str, last: Mapping[str, bytes]) -> str:
    """Write DIGESTS, close the ledger over all files since its opening, and return the closing digest, 64 hex digits.

    Args:
        rounds: number of finished rounds. ended: why the run stopped early, or an empty string.
        last: files written after the ledger is closed, so that they show that the run has ended.

    Raises:
        LedgerError: it is already closed over other content.
    """
    with Ledger.open(run / "ledger.sqlite") as ledger:
        listed = {*ledger.meta["files"], *last, DIGESTS}
        new = {name: digest for name, digest in _digests_of(run).items() if name not in listed}
        private_digests = json_text({name: digest for name, digest in new.items() if _private(name)}).encode()
        files = {name: digest for name, digest in new.items() if not _private(name)}
        files |= {DIGESTS: hashlib.sha256(_salt(run) + private_digests).hexdigest()}
        files |= {name: hashlib.sha256(content).hexdigest() for name, content in last.items()}
        content = {"files": dict(sorted(files.items())), "rounds": rounds, "ended": ended}
        if ledger.closing is None:
            private_folder(run)
            write_bytes(run / DIGESTS, private_digests)
            return ledger.conclude(content)
        closed_over, digest = ledger.closing
        if closed_over != content:
            raise LedgerError(f"the ledger of {run} is closed over other files: move the run away and keep it as it is")
        return digest


SIGNATURE = "closing.sig"
_NAMESPACE = "fedveil-run"
SUBJECT = "signature"


class Signer(NamedTuple):
    """Required signer: a name, and the allowed_signers file (see ssh-keygen) with that person's keys."""

    identity: str
    allowed: Path


def sign_run(run: Path, key: Path) -> Path:
    """Write `closing.sig` into a run directory and return its path.

    Args:
        key: a private key, or the .pub file of a key that ssh-agent holds.

    Raises:
        FedveilError: nothing to sign, a contradiction, an existing signature, an error of ssh-keygen, or a full disk.
    """
    target = run / SIGNATURE
    if target.exists():
        raise FedveilError(f"{target} exists: a run is signed once; move the signature away to sign anew")
    verified = verify_run(run)
    wrong = [f"{f.subject}: {f.text}" for f in verified.findings if f.kind == "contradicted"]
    if wrong:
        raise FedveilError(f"{run} contradicts itself, so it is not signed: {'; '.join(wrong)}")
    if not verified.closing:
        raise FedveilError(f"{run} has no closed ledger that can be read, so there is no closing digest to sign")
    message = f"{verified.closing}\n"
    signed = _ssh_keygen(["sign", "-f", str(key), "-n", _NAMESPACE], message)
    if signed.returncode:
        raise FedveilError(f"ssh-keygen cannot sign with {key}: {_last_line(signed.stderr)}")
    try:
        write_text(target, message + signed.stdout)
    except OSError as problem:
        raise FedveilError(f"cannot write {target}: {problem.strerror}; make room and sign again") from problem
    return target


def check_signature(run: Path, closing: str, signer: Signer | None) -> Finding | None:
    """Return the result for `closing.sig` of a run directory; None if it is missing and none is required.

    Args:
        closing: the closing digest of the ledger.

    Raises:
        FedveilError: the file of allowed signers cannot be read, or ssh-keygen is missing.
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
        options = ["verify", "-f", str(signer.allowed), "-I", signer.identity, "-n", _NAMESPACE, "-s", file.name]
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
"""Limits of what is unpacked; a zip of a few kilobytes can hold petabytes."""
_BROKEN = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield the run directory in a zip, unpacked temporarily.

    Raises:
        ConfigError: not a zip, a broken one, one over the limits or with doubtful names, or not exactly one run in it.
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
    """Refuse, before anything is written, an archive that is too large, or that different programs would unpack differently."""
    size = sum(entry.file_size for entry in entries)
    if size > MOST_BYTES or len(entries) > MOST_FILES:
        raise ConfigError(
            f"{path} would unpack to {size:,} bytes in {len(entries):,} files, and at most {MOST_BYTES:,} bytes in "
            f"{MOST_FILES:,} files are unpacked: unpack it yourself and give the directory"
        )
    names = set[str]()
    for entry in entries:
        name = PurePosixPath(entry.filename.replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or ":" in entry.filename or stat.S_ISLNK(entry.external_attr >> 16):
            raise ConfigError(f"{path} holds {entry.filename!r}, a link or a path out of its folder: nothing was unpacked")
        if (folded := str(name).casefold()) in names:
            raise ConfigError(
                f"{path} holds {entry.filename!r} twice: nothing was unpacked, since programs differ in which they take"
            )
        names.add(folded)


TITLES = {
    "contradicted": "Contradicted",
    "unknown": "Cannot tell",
    "verified": "Verified",
    "trust": "What has to be trusted",
}


def headline(name: str, verified: Verification) -> str:
    """Return the outcome in one line."""
    counts = [(len(lines), kind) for kind, lines in lines_by_kind(verified).items() if kind != "trust"]
    return f"{printable(name)}: {verified.outcome} ({', '.join(f'{n} {TITLES[kind].lower()}' for n, kind in counts)})"


def lines_by_kind(result: Verification) -> dict[str, list[str]]:
    """Return the findings of each kind that occurs, a line each."""
    lines = {kind: [f"{printable(f.subject)}: {printable(f.text)}" for f in result.findings if f.kind == kind] for kind in TITLES}
    return {kind: some for kind, some in lines.items() if some}


def problems(verified: Verification) -> list[str]:
    """Return what is contradicted, and what could not be checked, a line each."""
    return [
        f"{TITLES[kind].lower()}: {line}"
        for kind, lines in lines_by_kind(verified).items()
        for line in lines
        if kind in ("contradicted", "unknown")
    ]


def printable(text: str) -> str:
    """Return an untrusted text on one line, with escapes for characters that move the cursor, change direction or break lines."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def verification(
    path: str | Path,
    *,
    pin: str | None = None,
    signer: Signer | None = None,
    trust_plugins: bool = False,
    against: Sequence[Path] = (),
    on_step: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check a run directory, a zip of one, or the ledger of a lifetime budget.

    Nothing is written to it, and its code runs only if its plugins are trusted.

    Args:
        pin: the closing digest as known from elsewhere. signer: required signer.
        trust_plugins: run plugins that the run names, at their recorded digests, to recompute the statement.
        against: folders of clients that took part, whose ledgers and receipts are held against the run's.
        on_step: called with (rows of the ledger read, all rows).

    Raises:
        FedveilError: a required signature cannot be checked, or a pin or signer is given for a ledger.
    """
    if Path(path).is_dir():
        verified = _of_directory(Path(path), pin, signer, trust_plugins, on_step)
        ledgers = [finding for folder in against for finding in compared(Path(path), folder)]
        return verified._replace(findings=(*verified.findings, *ledgers, *compare_receipts(Path(path), against)))
    if against:
        raise ConfigError(f"--against compares a run directory with folders of clients, and {path} is none: unpack it first")
    if _is_database(Path(path)):
        if pin is not None or signer is not None:
            raise ConfigError(f"{path} is a ledger without a closing digest: --pin, --signers and --identity are for runs")
        return verify_ledger(path, on_step=on_step)
    try:
        with unpacked(Path(path)) as run:
            return _of_directory(run, pin, signer, trust_plugins, on_step)
    except ConfigError as problem:
        return Verification((Finding("unknown", "run", str(problem)),))


def _is_database(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def verified_ledger(verified: Verification) -> str:
    """Return the closing digest if rows, chain and head are verified; else an empty string."""
    right = {finding.subject for finding in verified.findings if finding.kind == "verified"}
    return verified.closing if {"ledger", "head"} <= right else ""


def _of_directory(
    run: Path, pin: str | None, signer: Signer | None, trust_plugins: bool, on_step: Callable[[int, int], None] | None
) -> Verification:
    verified = verify_run(run, pin=pin, on_step=on_step)
    if len(verified.findings) == 1:  # it could not be read at all, so nothing else of it can
        return verified
    added = recertify(run, trust_plugins=trust_plugins) if (run / "statement.json").is_file() else []
    added += check_receipts(run, bool(verified.closing))
    signature = check_signature(run, verified.closing, signer)
    return Verification((*verified.findings, *added, *([signature] if signature else [])), verified.closing)
