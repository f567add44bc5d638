"""The same bits of a round, sent again, are one release; other bits are a second one, and cost what two releases cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unit, View
from fedveil.errors import BudgetExhausted
from fedveil.ledger.budget import Budgets, GdpFilter
from fedveil.ledger.budgeted_ledger import BudgetedLedger, named_bits, naming_bits
from fedveil.ledger.entry import Entry
from fedveil.ledger.ledger import Ledger

SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER)
ONE = Entry("r", 0, 2, SCOPE.unit, SCOPE.adjacency, SCOPE.view, Gaussian(0.5), (1.0,), (2.0,), 10, 10, 1)


def ledger(path: Path, releases: int, **more: BudgetedLedger) -> BudgetedLedger:
    """With room for so many releases of mu = 0.5."""
    Ledger.create(path, "r").close()
    return BudgetedLedger(path, Budgets(GdpFilter.from_mu(0.5 * releases**0.5 * (1 + 1e-9), 1e-5), SCOPE), **more)


def test_a_note_names_bits_beside_what_it_says_already() -> None:
    assert named_bits(ONE) == ""
    assert named_bits(naming_bits(ONE, "ab")) == "ab"
    assert naming_bits(replace(ONE, note="DP-SGD"), "ab").note == "DP-SGD; released sha256 ab"


def test_the_same_bits_are_charged_once_and_others_twice(tmp_path: Path) -> None:
    population = ledger(tmp_path / "all", 4)
    own = ledger(tmp_path / "own", 4, population=population)
    first, second = naming_bits(ONE, "aa"), naming_bits(ONE, "bb")
    later, other = replace(first, round=1), replace(first, client=3)
    for entries in ([first], [first], [second], [later, second], [other, later]):
        own.charge_all(entries)
    for path in ("own", "all"):
        with Ledger.open(tmp_path / path) as written:
            assert [entry for _, _, entry in written.entries()] == [first, second, later, other]


def test_a_lifetime_that_was_charged_before_the_crash_is_not_charged_again_for_the_same_bits(tmp_path: Path) -> None:
    population = ledger(tmp_path / "all", 2)
    own = ledger(tmp_path / "own", 2, population=population)
    population.charge_all([naming_bits(ONE, "aa")])  # and killed before its own ledger was
    own.charge_all([naming_bits(ONE, "aa")])
    assert len(Ledger.open(tmp_path / "all")) == len(Ledger.open(tmp_path / "own")) == 1


def test_rows_that_name_no_bits_are_charged_each_time_and_a_budget_holds(tmp_path: Path) -> None:
    own = ledger(tmp_path / "own", 2)
    own.charge_all([ONE])
    own.charge_all([ONE])
    with pytest.raises(BudgetExhausted):
        own.charge_all([ONE])
    with pytest.raises(BudgetExhausted):
        own.charge_all([naming_bits(ONE, "aa")])
