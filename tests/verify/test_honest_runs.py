"""Honest runs are never accused, whatever their method, view, unit, size and fate."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest

import fedveil as fv
from honest_runs import honest_run

pytestmark = pytest.mark.heavy
FAST, OTHERS, ALL = range(21, 33), (*range(21), *range(33, 40)), range(1000, 1300)


def accused(numbers: Iterable[int], folder: Path) -> list[str]:
    """The runs that verification does not call what they are."""
    folder.mkdir()
    found = []
    for number in numbers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            words, run, status = honest_run(number, folder)
        verification = fv.verification(run)
        if verification.exit_status != status:
            wrong = [f"{f.subject}: {f.text}" for f in verification.findings if f.kind in ("contradicted", "unknown")]
            found.append(f"{words}: {verification.outcome}: {wrong}")
        shutil.rmtree(folder)
        folder.mkdir()
    return found


def test_honest_runs_are_not_accused(tmp_path: Path) -> None:
    assert accused(FAST, tmp_path / "runs") == []


@pytest.mark.slow
def test_other_honest_runs_are_not_accused(tmp_path: Path) -> None:
    assert accused(OTHERS, tmp_path / "runs") == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(ALL.start, ALL.stop, 50))
@pytest.mark.timeout(1800)
def test_three_hundred_honest_runs_are_not_accused(first: int, tmp_path: Path) -> None:
    assert accused(range(first, first + 50), tmp_path / "runs") == []
