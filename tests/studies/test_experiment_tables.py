"""The history on disk, added to round by round, is the history written whole."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from fedveil.experiment.run_directory import append_history, write_history
from fedveil.federation.history import Record
from method_kit import layout

LAYOUT = layout({"w": (2, 2), "b": (2,)})


def row(t: int, failures: dict[int, str], scores: dict[str, Any] | None = None, **more: Any) -> Record:
    public = {"round": t, "participants": 3, "layer_clip": [0.1 * t, 1.0], **more}
    return Record(public, {"failed": len(failures), "failures": failures, **(scores or {})})


HISTORY = [
    row(0, {}),
    row(1, {}, {"client_accuracy": [0.25, None, 1.0]}, test_accuracy=0.5),
    row(2, {}),
    row(3, {2: 'ValueError: a "quoted", odd\nreason', 5: "no answer within 3 seconds"}),
    row(4, {}, {"client_accuracy": [0.5, None, 1.0], "personal_accuracy": [1.0, None, 0.0]}, test_accuracy=float("inf")),
    row(5, {1: "its worker process died (tried 2 times)"}, skipped="2 of the 4 clients that privacy.min_survivors asks for"),
]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.csv")}


def test_adding_round_by_round_is_writing_whole(tmp_path: Path) -> None:
    added, whole = tmp_path / "added", tmp_path / "whole"
    added.mkdir()
    whole.mkdir()
    for rounds in range(1, len(HISTORY) + 1):
        append_history(added, HISTORY[:rounds], LAYOUT)
        write_history(whole, HISTORY[:rounds], LAYOUT)
        assert contents(added) == contents(whole)
    public, private = ("history.csv", "layers.csv"), ("history.csv", "clients.csv", "failures.csv")
    assert set(contents(added)) == {*public, *(f"private/{name}" for name in private)}
    with (added / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["round", "participants", "test_accuracy", "skipped"]
    assert rows[5]["skipped"].startswith("2 of the 4")
    with (added / "private" / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["round", "failed", "failures"]
    assert [r["failures"] for r in rows] == [
        *("", "", "", '2: ValueError: a "quoted", odd\nreason; 5: no answer within 3 seconds', ""),
        "1: its worker process died (tried 2 times)",
    ]


def test_a_round_does_not_write_the_rounds_before_again(tmp_path: Path) -> None:
    history = [row(t, {}) for t in range(50)]
    write_history(tmp_path, history[:49], LAYOUT)
    places = {name: (tmp_path / name).stat().st_ino for name in contents(tmp_path)}
    before = contents(tmp_path)
    append_history(tmp_path, history, LAYOUT)
    after = contents(tmp_path)
    assert {name: (tmp_path / name).stat().st_ino for name in after} == places
    for name in before:
        assert after[name].startswith(before[name])
        assert 0 < len(after[name]) - len(before[name]) < 100
