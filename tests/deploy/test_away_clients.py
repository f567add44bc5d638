"""Machines that are away: a round goes on without some of them, waits for the first of them, and ends no run for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.deploy.grid_engine import GONE
from fedveil.deploy.offers import AGAIN, SILENT
from fedveil.verify.check_run import verify_run
from full_disk import NoRoomForStates
from joined_clients import machines, rows, served, small

WAITS = "the round waits for the first answer of its 3 clients, and asks again every minute"


@pytest.mark.few(1)
@pytest.mark.parametrize(("view", "away"), [("server", {1, 2}), ("aggregate", {2, 1}), ("server", {2})])
def test_a_round_with_as_many_left_out_as_answered_ends_no_run(view: str, away: set[int], tmp_path: Path) -> None:
    """Two of three hospitals were away for a round: the run had ended for good, although the third was charged for it."""
    there = machines(tmp_path / "clients")

    def after(row: Any) -> None:
        there.off = away if row["round"] == 0 else set()

    result, _ = served(small(view, training={"rounds": 4}), tmp_path / "server", there, on_round=after)
    assert [row["participants"] for row in result.history] == [3, 3 - len(away), 3, 3]
    assert result.ended == ""
    (left_out,) = (line for line in result.warnings if line.endswith(GONE))
    assert left_out.startswith(f"{len(away)} client update")
    assert verify_run(tmp_path / "server").outcome == "verified"


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_round_waits_for_its_first_answer_and_is_charged_once(view: str, tmp_path: Path) -> None:
    """It ended the server with an error, and two of them the run."""
    there, waits, seen = machines(tmp_path / "clients"), list[float](), list[dict[int, Any]]()

    def after(row: Any) -> None:
        there.off = {0, 1, 2} if row["round"] == 0 else set()
        seen.append(row["failures"])

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        there.off = {0, 1, 2} if len(waits) < 3 else {2}

    result, lines = served(small(view, training={"rounds": 3}), tmp_path / "server", there, on_round=after, sleep=sleep)
    assert [row["participants"] for row in result.history] == [3, 2, 3]
    assert (len(waits), result.ended) == (3, "")
    assert seen == [{}, {2: SILENT}, {}]
    assert [line for line in lines if "waits" in line] == [WAITS]
    assert [e.round for e in rows(tmp_path / "server/ledger.sqlite")] == (
        [0] * 3 + [1] * 2 + [2] * 3 if view == "server" else [0, 1, 2]
    )
    assert verify_run(tmp_path / "server").outcome == "verified"


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_clients_whose_disks_are_all_full_are_asked_again_after_a_while(
    view: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, clock = machines(tmp_path / "clients"), [0.0]
    monkeypatch.setattr("fedveil.deploy.offers.time.monotonic", lambda: clock[0])
    full = NoRoomForStates(tmp_path / "clients")

    def sleep(seconds: float) -> None:
        clock[0] += AGAIN / 2
        if clock[0] > AGAIN:
            full.__exit__()

    with full:
        result, lines = served(small(view), tmp_path / "server", there, sleep=sleep)
    assert [row["participants"] for row in result.history] == [3, 3]
    assert lines == [WAITS]
    assert 2 * AGAIN <= clock[0] < 3 * AGAIN
    assert verify_run(tmp_path / "server").outcome == "verified"


@pytest.mark.few(1)
@pytest.mark.parametrize(("view", "sampling"), [("server", "fixed"), ("aggregate", "fixed"), ("aggregate", "poisson")])
def test_a_round_goes_on_without_the_clients_it_asks_where_others_are_there(view: str, sampling: str, tmp_path: Path) -> None:
    """Only a secret sample has the sum of nobody released, with its noise: else a round without one would tell who was drawn."""
    consents = {"lifetime": {view: {"epsilon": 60.0, "delta": 0.01, "order": 6}}}
    there, lonely = (
        machines(tmp_path / "clients", **consents),
        small(view, training={"clients_per_round": 1, "sampling": sampling, "rounds": 8}),
    )
    there.off, waits = {1, 2}, list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        there.off = {1, 2} if len(waits) % 2 else {2}  # another one comes, and leaves again

    result, _ = served(lonely, tmp_path / "server", there, sleep=sleep)
    nobody = [row for row in result.history if row["failures"] and not row["participants"]]
    assert (len(result.history), result.ended) == (8, "")
    assert nobody
    for row in nobody:
        assert ("skipped" in row) == (sampling == "fixed")
    charged = {e.round for e in rows(tmp_path / "server/ledger.sqlite")}
    assert charged.isdisjoint(row["round"] for row in nobody) == (sampling == "fixed")
    assert verify_run(tmp_path / "server").outcome == "verified"
