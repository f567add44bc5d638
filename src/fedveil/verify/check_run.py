"""Verify a run directory, or a zip of one: what is bound together, what is recomputed, and what nobody can know from it."""

from __future__ import annotations

import csv
import hashlib
import json
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedveil.verify import statement_checks
from fedveil.verify.finding import Finding, Findings, Verification
from fedveil.verify.ledger_file import Broken, LedgerFile, NotReadable
from fedveil.verify.row_costs import RowCosts

_PARSERS: dict[str, Callable[[str], Any]] = {
    "config.toml": tomllib.loads,
    "statement.json": json.loads,
    "data.json": json.loads,
    "history.csv": lambda text: list(csv.DictReader(text.splitlines())),
}
Step = Callable[[int, int], None]
_TRUST = (
    (
        "all releases",
        "that nothing left beside the recorded releases: the run's code; secure aggregation or two ledgers remove it",
    ),
    ("secret noise", "that nobody saw the noise: the machine that drew it; attestation or noise in shares removes it"),
    ("the data", "that the data were those of the card, and that clients are people: whoever ran it; attestation removes it"),
)
_PROBLEMS = (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, StopIteration, IndexError)


def verify_run(path: str | Path, *, pin: str | None = None, on_step: Step | None = None) -> Verification:
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
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as problem:
            found = f"{path} is neither a run directory nor a zip of one ({problem})"
            return Verification((Finding("unknown", "run", found),))
        return _verify(ledger.parent, findings, pin, on_step)


def _verify(run: Path, findings: Findings, pin: str | None, on_step: Step | None) -> Verification:
    ledger = LedgerFile(run / "ledger.sqlite")
    try:
        files = {name: parse((run / name).read_text(encoding="utf-8")) for name, parse in _PARSERS.items()}
        scope = files["statement.json"]["scope"]
        charged = (scope["unit"], scope["adjacency"], scope["view"].replace("final", "aggregate"))
        spent = RowCosts(charged, files["config.toml"]["privacy"]["colluders"])
        for row in ledger.rows(on_step):
            spent.add(row, ledger.run)
        findings.check(True, "ledger", "", f"{ledger.releases} releases in one chain{', as published' * ledger.published}")
        _check_ends(findings, ledger, pin)
        _check_files(findings, run, ledger)
        _check_numbers(findings, ledger, spent, files)
    except (NotReadable, FileNotFoundError) as problem:
        findings.append(Finding("unknown", "files", f"not every file of a run can be read ({problem})"))
    except (Broken, OSError, *_PROBLEMS) as problem:
        findings.append(Finding("contradicted", "files", f"not what a run writes ({problem})"))
    findings.extend(Finding("trust", subject, text) for subject, text in _TRUST)
    return Verification(tuple(findings), ledger.closing_digest)


def _check_ends(findings: Findings, ledger: LedgerFile, pin: str | None) -> None:
    """The head file, the closing and the pin."""
    seq, digest = ledger.head()
    same = seq == ledger.releases and (seq == 0 or digest == ledger.last)
    findings.check(same, "head", f"release {seq} is the last", f"{ledger.releases} releases")
    if not ledger.closing:
        text = "the ledger is not closed: the run has not ended, or its closing was taken away"
        findings.append(Finding("unknown", "closing", text))
    if pin is not None:
        findings.check(ledger.closing_digest == pin.strip().lower(), "pin", pin, ledger.closing_digest or "no closing digest")
    else:
        text = f"{ledger.closing_digest or 'none'}: only a digest known from elsewhere (--pin) tells a wholly rewritten run"
        findings.append(Finding("trust", "closing digest", text))


def _check_files(findings: Findings, run: Path, ledger: LedgerFile) -> None:
    """Every file beside its digest at the opening or the closing."""
    bound: dict[str, str] = {**ledger.opening["files"], **ledger.closing.get("files", {})}
    if ledger.published:
        bound = {name: digest for name, digest in bound.items() if not name.startswith("private/") or (run / name).exists()}
    there = {file.relative_to(run).as_posix(): file for file in run.rglob("*") if file.is_file()}
    for name in sorted(bound.keys() - there.keys()):
        findings.append(Finding("unknown", "files", f"{name} is gone"))
    checked = sorted(bound.keys() & there.keys())
    salt = there["private/salt"].read_bytes() if "private/salt" in there else b""  # goes before what is private
    wrong = [n for n in checked if hashlib.sha256(salt * (n[:8] == "private/") + there[n].read_bytes()).hexdigest() != bound[n]]
    what = f"changed: {', '.join(wrong)}" if wrong else f"{', '.join(checked)} are those that the run wrote"
    findings.check(not wrong and {"config.toml", "statement.json"} <= bound.keys(), "files", "what the run wrote", what)
    outside = sorted(name for name in there.keys() - bound.keys() if not name.startswith("ledger.sqlite"))
    if outside:
        findings.append(Finding("trust", "other files", f"no digest covers {', '.join(outside)}"))


def _check_numbers(findings: Findings, ledger: LedgerFile, spent: RowCosts, files: dict[str, Any]) -> None:
    statement, rounds = files["statement.json"], [int(row["round"]) for row in files["history.csv"]]
    complete = bool(ledger.closing) and not ledger.closing["ended"] and len(rounds) == statement["rounds"]
    statement_checks.check_configuration(findings, statement, files["config.toml"], files["data.json"]["clients"])
    statement_checks.check_statement(findings, statement)
    statement_checks.check_rows(findings, spent, statement, complete)
    expected = ledger.closing.get("rounds", len(rounds))
    findings.check(rounds == list(range(expected)), "rounds of the history", expected, len(rounds))
    beyond = [r for r in spent.rounds if r > expected - bool(ledger.closing)]
    silent = [r for r in rounds if r not in spent.rounds and statement["scope"]["view"] != "server"]
    findings.check(
        not beyond + silent, "rounds of the ledger", f"releases of each of {expected} rounds", beyond + silent or "all"
    )
    whole = spent.dimension >= statement["dimension"] or not ledger.releases
    findings.check(whole, "dimension", statement["dimension"], spent.dimension)
