"""Verify a run directory, or a zip of one: what is bound together, what is recomputed, and what nobody can know from it."""

from __future__ import annotations

import csv
import hashlib
import json
import tempfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedveil.verify import statement_checks
from fedveil.verify.finding import Finding, Findings, Verification
from fedveil.verify.ledger_file import LedgerFile
from fedveil.verify.row_costs import RowCosts

_PARSERS: dict[str, Callable[[str], Any]] = {
    "config.toml": tomllib.loads,
    "statement.json": json.loads,
    "data.json": json.loads,
    "statement.md": str,
    "history.csv": lambda text: list(csv.DictReader(text.splitlines())),
}
_TRUST = {
    "all releases": "that nothing left beside these releases: the run's code; secure aggregation or two ledgers remove it",
    "secret noise": "that nobody saw the noise: the machine that drew it; attestation or noise in shares removes it",
    "the data": "that they were those of the card, and clients people: whoever ran it; attestation removes it",
}


def verify_run(path: str | Path, *, pin: str | None = None, on_step: Callable[[int, int], None] | None = None) -> Verification:
    """Check a run directory (or a zip of one) without running any of its code, and without writing to it.

    pin: the closing digest that is known from elsewhere. on_step: called with (rows read, rows there).
    """
    path, findings = Path(path), Findings()
    if path.is_dir():
        return _verify(path, findings, pin, on_step)
    with tempfile.TemporaryDirectory(prefix="fedveil-verify-") as folder:
        try:
            with zipfile.ZipFile(path) as archive:  # which never extracts outside the folder
                archive.extractall(folder)
            (ledger,) = Path(folder).rglob("ledger.sqlite")
        except Exception as problem:  # as below
            return Verification((Finding("unknown", "run", f"{path} is neither a run directory nor a zip of one ({problem})"),))
        return _verify(ledger.parent, findings, pin, on_step)


def _verify(run: Path, findings: Findings, pin: str | None, on_step: Callable[[int, int], None] | None) -> Verification:
    ledger = LedgerFile(run / "ledger.sqlite")
    try:
        files = {name: parse((run / name).read_text(encoding="utf-8")) for name, parse in _PARSERS.items()}
        scope = files["statement.json"]["scope"]
        spent = RowCosts((scope["unit"], scope["adjacency"], scope["view"]), files["config.toml"]["privacy"]["colluders"])
        for row in ledger.rows(on_step):
            spent.add(row, ledger.run)
        findings.check(True, "ledger", "", f"{ledger.releases} releases in one chain{', as published' * ledger.published}")
        _check_ends(findings, ledger, pin)
        _check_files(findings, run, ledger)
        _check_numbers(findings, run, ledger, spent, files)
    except (OSError, NotImplementedError) as problem:
        findings.append(Finding("unknown", "run", f"not everything can be read, or computed here ({problem})"))
    except Exception as problem:  # whatever files of a stranger may cause
        findings.append(Finding("contradicted", "run", f"not what a run writes ({type(problem).__name__}: {problem})"))
    findings.extend(Finding("trust", subject, text) for subject, text in _TRUST.items())
    return Verification(tuple(findings), ledger.closing_digest)


def _check_ends(findings: Findings, ledger: LedgerFile, pin: str | None) -> None:
    """The head file, the closing and the pin."""
    head = f"fedveil ledger head {ledger.releases:020d} {ledger.last if ledger.releases else '0' * 64}\n"
    found = ledger.path.with_name(f"{ledger.path.name}-head").read_bytes().decode("ascii", "replace")
    findings.check(head == found, "head", head.strip(), found.strip())
    closing = ledger.closing_digest or "none"
    if not ledger.closing:
        findings.append(Finding("unknown", "closing", "not there: the run goes on, or its end was taken away"))
    if pin is not None:
        findings.check(closing == pin.strip().lower(), "pin", pin, closing)
    else:
        findings.append(Finding("trust", "closing digest", f"{closing}: only --pin, from elsewhere, tells a rewritten run"))


def _check_files(findings: Findings, run: Path, ledger: LedgerFile) -> None:
    """Every file beside its digest at the opening or the closing."""
    bound: dict[str, str] = {**ledger.opening["files"], **ledger.closing.get("files", {})}
    if ledger.published:
        bound = {name: digest for name, digest in bound.items() if not name.startswith("private/") or (run / name).exists()}
    there = {file.relative_to(run).as_posix(): file for file in run.rglob("*") if file.is_file()}
    findings.extend(Finding("unknown", "files", f"{name} is gone") for name in sorted(bound.keys() - there.keys()))
    checked = sorted(bound.keys() & there.keys())
    salt = there["private/salt"].read_bytes() if "private/salt" in there else b""  # goes before what is private
    wrong = [n for n in checked if hashlib.sha256(salt * (n[:8] == "private/") + there[n].read_bytes()).hexdigest() != bound[n]]
    wrong += [f"{name} (without a digest)" for name in _PARSERS if name not in bound and ledger.closing]
    findings.check(not wrong, "files", "what the run wrote", f"{'changed: ' * bool(wrong)}{', '.join(wrong or checked)}")
    outside = sorted(name for name in there.keys() - bound.keys() if not name.startswith("ledger.sqlite"))
    if outside:
        findings.append(Finding("trust", "other files", f"no digest covers {', '.join(outside)}"))


def _check_numbers(findings: Findings, run: Path, ledger: LedgerFile, spent: RowCosts, files: dict[str, Any]) -> None:
    statement, history, private = files["statement.json"], files["history.csv"], run / "private" / "history.csv"
    statement_checks.check_configuration(findings, statement, files["config.toml"], files["data.json"])
    complete = bool(ledger.closing) and not ledger.closing["ended"]
    finished = statement["rounds"] if complete else ledger.closing.get("rounds", len(history))
    rounds = [int(row["round"]) for row in history]
    right = rounds == list(range(finished)) and finished == ledger.closing.get("rounds", finished)
    findings.check(right, "rounds of the history", finished, len(rounds))
    others = _PARSERS["history.csv"](private.read_text(encoding="utf-8")) if private.exists() else []
    seen = Counter({int(row["round"]): int(row["participants"]) for row in (*history, *others) if row.get("participants")})
    least = 0 if statement["scope"]["view"] == "server" else -1
    few = [r for r in rounds if spent.participants.get(r, least) < seen[r]]
    few += [r for r in spent.participants if r > finished - bool(ledger.closing)]
    findings.check(not few, "rounds of the ledger", "the participants of the history", f"others in {few}" if few else "the same")
    excess = spent.dimension - statement["dimension"] if ledger.releases else 0
    findings.check(excess == 0 or (spent.extras and excess > 0), "dimension", statement["dimension"], spent.dimension)
    statement_checks.check_rows(findings, spent, statement, complete)
    statement_checks.check_statement(findings, statement, files["statement.md"])
