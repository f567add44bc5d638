"""A report verifies the rows of a ledger once; rows that are not verified are never drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import LedgerError
from fedveil.experiment.verification import verification, verified_ledger
from fedveil.ledger import ledger_store
from fedveil.ledger.ledger import Ledger
from fedveil.report.report import write_report
from finished_runs import finished
from forged_ledger import ForgedLedger

pytestmark = pytest.mark.heavy


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory, tmp_path)


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that a ledger's own code goes through the chain."""
    whole, read = ledger_store._verify_chain, list[int]()

    def counted(*arguments: Any) -> tuple[int, str]:
        read.append(1)
        return whole(*arguments)

    monkeypatch.setattr(ledger_store, "_verify_chain", counted)
    return read


def test_rows_that_verification_has_read_are_not_verified_again(run: Path, chains: list[int]) -> None:
    page = write_report([run]).read_text()
    assert chains == []
    assert '"problem":""' in page


def test_a_ledger_with_another_closing_is_read_whole(run: Path, chains: list[int]) -> None:
    closing = verification(run).closing
    Ledger.open(run / "ledger.sqlite", read_only=True, verified=closing).close()
    assert chains == []
    Ledger.open(run / "ledger.sqlite", read_only=True, verified="0" * 64).close()
    assert chains == [1]


def test_a_changed_row_is_not_drawn(run: Path, chains: list[int]) -> None:
    ledger = ForgedLedger.read(run)
    ledger.rows[0]["coordinates"] -= 1
    ledger.write(coherent=False)
    assert verified_ledger(verification(run)) == ""
    page = write_report([run]).read_text()
    assert chains == [1]
    assert "does not continue the hash chain" in page
    with pytest.raises(LedgerError):
        Ledger.open(run / "ledger.sqlite", read_only=True)


def test_a_ledger_whose_head_is_of_another_time_is_not_taken_as_verified(run: Path) -> None:
    head = run / "ledger.sqlite-head"
    head.write_text(head.read_text().replace("head 0", "head 1", 1))
    assert verified_ledger(verification(run)) == ""
    assert "ledger" in [finding.subject for finding in verification(run).findings if finding.kind == "verified"]
