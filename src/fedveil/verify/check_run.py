"""Verify a run directory: integrity, recomputed numbers, and facts that no file of a run can show."""

import hashlib
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.verify import statement_checks
from fedveil.verify.finding import Finding, Findings, Verification
from fedveil.verify.ledger_file import LedgerFile, read_json, read_table
from fedveil.verify.row_costs import Expected, RowCosts

_READERS: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": read_json, ".csv": read_table, ".md": str}
_READ = ("config.toml", "statement.json", "data.json", "statement.md", "history.csv")
_SHOWN = {*_READ, "layers.csv", "clients.csv", "participants.csv", "failures.csv", "columns.json", "partition.json"}
_TRUST = {
    "all releases": "that nothing left beside these releases: the run's code; secure aggregation or two ledgers remove it",
    "secret noise": "that nobody saw the noise: the machine that drew it; attestation or noise in shares removes it",
    "the data": "that they were those of the card, and clients people: whoever ran it; attestation removes it",
}


@np.errstate(all="warn", under="ignore")
def verify_run(path: str | Path, *, pin: str | None = None, on_step: Callable[[int, int], None] | None = None) -> Verification:
    """Check a run directory without running its code or writing to it; `on_step` is called with (rows read, total rows)."""
    run, findings = Path(path), Findings()
    odd = [file.relative_to(run) for file in run.rglob("*") if file.is_symlink() or not (file.is_file() or file.is_dir())]
    if odd or not run.is_dir():
        links = f"it holds links, pipes or devices ({', '.join(map(str, odd))}): copy what they stand for"
        return Verification((Finding("unknown", "run", f"{run} is not read: {links if odd else 'no directory'}"),))
    ledger = LedgerFile(run / "ledger.sqlite")
    try:
        files = {name: _READERS[Path(name).suffix]((run / name).read_text(encoding="utf-8")) for name in _READ}
        spent = RowCosts(statement_checks.expected(files["statement.json"], files["config.toml"]))
        for row in ledger.rows(on_step):
            spent.add(row, ledger.run)
        findings.check(True, "ledger", "", f"{ledger.releases} releases in one chain{', as published' * ledger.published}")
        _check_ends(findings, ledger, pin)
        _check_files(findings, run, ledger)
        _check_numbers(findings, run, ledger, spent, files)
        _name_the_rest(findings, files["config.toml"]["data"])
    except (OSError, NotImplementedError) as problem:
        findings.append(Finding("unknown", "run", f"not everything can be read, or computed here ({problem})"))
    except Exception as problem:  # files of a stranger may cause any error
        findings.append(Finding("contradicted", "run", f"not what a run writes ({type(problem).__name__}: {problem})"))
    findings.extend(Finding("trust", subject, text) for subject, text in _TRUST.items())
    return Verification(tuple(findings), ledger.closing_digest)


_LIFETIME_TRUST = {
    "all releases": "that nothing left beside these releases, and that no other ledger counts releases of the same data",
    "secret noise": _TRUST["secret noise"],
    "this copy": "that it is the latest: only a copy of the head (the file that ends in -head) from elsewhere tells an older one",
}
_GAUSSIAN: tuple[str, float | None] = ("gaussian", None)
_SEEDED = "noise from a seed"
"""Note of a row whose noise is no secret."""


@np.errstate(all="warn", under="ignore")
def verify_ledger(path: str | Path, *, on_step: Callable[[int, int], None] | None = None) -> Verification:
    """Check the ledger of a lifetime budget, such as a Releaser's: chain, head, cost of each row, and their sum."""
    findings, ledger, others, seeded, scope = Findings(), LedgerFile(Path(path)), 0, 0, ()
    try:
        spent = RowCosts()
        for row in ledger.rows(on_step):
            scope = scope or tuple(ledger.opening.get("budget", {}).get(name) for name in ("unit", "adjacency", "view"))
            spent.expected = Expected(scope, clients=2**63, kinds=frozenset({_GAUSSIAN}))
            spent.dimension = 0  # releases of several models may share a lifetime
            others += (row["event"], row["rate"]) != _GAUSSIAN
            seeded += row["note"] == _SEEDED
            spent.add(row, row["run"])
        if (budget := ledger.opening.get("budget")) is None:
            raise NotImplementedError("it is the ledger of one run: give the run directory")
        findings.check(True, "ledger", "", f"{ledger.releases} releases in one chain")
        _check_head(findings, ledger)
        if seeded:
            found = f"noise from a seed in {seeded} of {ledger.releases} releases: a simulation, which protects nobody"
            findings.check(False, "secret noise", "noise that nobody can draw again", found)
        if others:
            raise NotImplementedError(f"{others} releases of sampled or unproven kinds, whose runs have to be verified")
        findings.check(
            not spent.wrong, "rows", "scope and cost as they follow from clip and noise", spent.wrong or "each as it follows"
        )
        epsilon = spent.curve(budget["delta"], budget["adjacency"]).epsilon if ledger.releases else 0.0
        right, most = epsilon <= budget["epsilon"] * (1 + statement_checks.EXACT), f"at most {budget['epsilon']:.9g}"
        terms = f"at delta = {budget['delta']:.9g}, {budget['unit']} level, {budget['adjacency']}, {budget['view']} view"
        findings.check(right, "epsilon spent", most, f"{epsilon:.9g} of {budget['epsilon']:.9g}, {terms}")
    except (OSError, NotImplementedError) as problem:
        findings.append(Finding("unknown", "ledger", f"not everything can be read, or computed here ({problem})"))
    except Exception as problem:  # whatever files of a stranger may cause
        findings.append(Finding("contradicted", "ledger", f"not what a release writes ({type(problem).__name__}: {problem})"))
    findings.extend(Finding("trust", subject, text) for subject, text in _LIFETIME_TRUST.items())
    return Verification(tuple(findings))


def _name_the_rest(findings: Findings, data: dict[str, Any]) -> None:
    """Name the messages of a program that fedveil does not run that are not releases."""
    if data["name"] == "nvflare-job":
        left = "metrics and numbers of examples that sites send to the server, and what its other components publish of them"
        findings.append(Finding("trust", "outside the aggregator", left))
    if data["name"] == "flower-app":
        asked = "that the app asked its clients nothing by messages of its own, which they answer without noise: whoever wrote it"
        findings.append(Finding("trust", "outside the strategy", asked))
        if data.get("partition", {}).get("evaluate"):
            left = "clients evaluate: what they answer (metrics) leaves without clip or noise, and no number above covers it"
            findings.append(Finding("trust", "evaluation", left))


def _check_ends(findings: Findings, ledger: LedgerFile, pin: str | None) -> None:
    """Check the head file, the closing entry and the pin."""
    _check_head(findings, ledger)
    closing = ledger.closing_digest or "none"
    findings.extend([Finding("unknown", "closing", "not there: the run goes on, or its end was cut off")] * (not ledger.closing))
    if pin is not None:
        findings.check(closing == pin.strip().lower(), "pin", pin, closing)
    else:
        findings.append(Finding("trust", "closing digest", f"{closing}: only --pin, from elsewhere, tells a rewritten run"))


def _check_head(findings: Findings, ledger: LedgerFile) -> None:
    head = f"fedveil ledger head {ledger.releases:020d} {ledger.last if ledger.releases else '0' * 64}\n"
    found = ledger.path.with_name(f"{ledger.path.name}-head").read_bytes().decode("ascii", "replace")
    findings.check(head == found, "head", head.strip(), found.strip())


def _check_files(findings: Findings, run: Path, ledger: LedgerFile) -> None:
    """Compare every file with its digest in the opening or the closing entry."""
    bound: dict[str, str] = {**ledger.opening["files"], **ledger.closing.get("files", {})}
    there = {file.relative_to(run).as_posix(): file for file in run.rglob("*") if file.is_file()}
    if (own := "private/digests.json") in bound.keys() & there.keys():  # private files, which the ledger does not name
        bound = read_json(there[own].read_text(encoding="utf-8")) | bound
    copied = ledger.published or not (ledger.releases or (run / "private").exists())  # without private files
    bound = {n: digest for n, digest in bound.items() if n in there or n[:8] != "private/" or not copied}
    findings.extend(Finding("unknown", "files", f"{name} is gone") for name in sorted(bound.keys() - there.keys()))
    checked = sorted(bound.keys() & there.keys())
    salt = there["private/salt"].read_bytes() if "private/salt" in there else b""  # goes before what is private
    wrong = [n for n in checked if hashlib.sha256(salt * (n[:8] == "private/") + there[n].read_bytes()).hexdigest() != bound[n]]
    for name in (name for name in checked if there[name].suffix in _READERS):
        _READERS[there[name].suffix](there[name].read_text(encoding="utf-8"))
    outside = sorted(there.keys() - bound.keys() - {"ledger.sqlite", "ledger.sqlite-head", "receipts.jsonl"})
    wrong += [f"{n} (without a digest)" for n in outside if n.casefold().removeprefix("private/") in _SHOWN and ledger.closing]
    findings.check(not wrong, "files", "what the run wrote", f"{'changed: ' * bool(wrong)}{', '.join(wrong or checked)}")
    findings.extend([Finding("trust", "other files", f"no digest covers {', '.join(outside)}")] * bool(outside))


def _check_numbers(findings: Findings, run: Path, ledger: LedgerFile, spent: RowCosts, files: dict[str, Any]) -> None:
    statement, history, private = files["statement.json"], files["history.csv"], run / "private" / "history.csv"
    statement_checks.check_configuration(findings, statement, files["config.toml"], files["data.json"])
    complete = bool(ledger.closing) and not ledger.closing["ended"]
    finished = statement["rounds"] if complete else ledger.closing.get("rounds", len(history))
    rounds, held, view = [int(row["round"]) for row in history], spent.participants, statement["scope"]["view"]
    promised = {v["proven"]["scope"]["view"] for v in statement["views"] if v["proven"]["epsilon"] != "inf"}
    empty = -1 if view in promised - {"server"} else 0  # in a round without a row; a noised sum without clients has a row, too
    right = rounds == list(range(finished)) and finished == ledger.closing.get("rounds", finished)
    findings.check(right, "rounds of the history", finished, len(rounds))
    others = read_table(private.read_text(encoding="utf-8")) if private.exists() else []
    seen = Counter({int(row["round"]): int(row["participants"]) for row in (*history, *others) if row.get("participants")})
    fewest = files["config.toml"]["privacy"].get("min_survivors", 0)  # with it, rounds may be skipped or have more noise
    told = {int(row["round"]) for row in (*history, *others) if row.get("skipped") and statement["sampling"] == "fixed"}
    excused = {r for r in rounds if seen[r] < fewest or (r in told and not seen[r])}  # skipped, or not public
    whole = bool(ledger.closing) and (complete or finished not in held)  # else charged before a crash, too costly to repeat
    few = [r for r in {*rounds, *held} - excused if held.get(r, empty) < seen[r] or r > finished - whole]
    findings.check(not few, "rounds of the ledger", "the participants of the history", f"others in {few}" if few else "the same")
    excess = spent.dimension - statement["dimension"] if ledger.releases else 0
    findings.check(excess == 0 or (spent.extras and excess > 0), "dimension", statement["dimension"], spent.dimension)
    statement_checks.check_rows(findings, spent, statement, complete and not (fewest or told), history, whole)
    statement_checks.check_statement(findings, statement, files["statement.md"], spent.expected)
