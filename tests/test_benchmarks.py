"""The benchmarks, which nothing else runs: their federations train."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedveil.executors.inline import Inline
from fedveil.federation.fit import one_round
from fedveil.federation.progress import start
from fedveil.methods.fedavg import DPFedAvg

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the benchmarks, imported as their programs import it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for own in ("sides", "limit", "harness"):
        monkeypatch.delitem(sys.modules, own, raising=False)
    return importlib.import_module(name)


def test_a_federation_of_the_benchmarks_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = program("sides", monkeypatch)
    job = sides.federation("W0", DPFedAvg(), sides.setting("W0"))
    progress = start(job)
    first = progress.model.clone()
    with Inline(job.context) as engine:
        one_round(job, engine, progress)
    assert not progress.model.equal(first)
    assert len(progress.history) == 1


def test_only_missing_cases_are_done_and_each_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, path = program("harness", monkeypatch), tmp_path / "found.json"
    found = harness.kept(path)
    harness.fill(path, found, {("a", "1"): (sum, [1, 2]), ("b",): (max, 3, 4)})
    with pytest.raises(TypeError):
        harness.fill(path, found, {("a", "1"): (pytest.fail, "done again"), ("a", "2"): (sum, [5]), ("c",): (sum,)})
    assert found == harness.kept(path) == json.loads(path.read_text()) == {"a": {"1": 3, "2": 5}, "b": 4}


def test_names_and_options_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = program("harness", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["program", "b", "--rounds", "2", "--views", "server", "--dry-run"])
    asked = harness.arguments("", ("a", "b"), rounds=5, views={"server": 1, "final": 2}, only=str, dry_run=False, seeds=[1])
    assert vars(asked) == {"names": ["b"], "rounds": 2, "views": ["server"], "only": None, "dry_run": True, "seeds": [1]}
    monkeypatch.setattr(sys, "argv", ["program", "c"])
    with pytest.raises(SystemExit):
        harness.arguments("", ("a", "b"))


def test_a_table_is_put_between_its_marks_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = program("harness", monkeypatch)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    (page := tmp_path / "docs" / "page.md").parent.mkdir()
    page.write_text("before\n<!-- one -->\nold\n<!-- end -->\nafter\n")
    harness.put("page.md", "<!-- one -->", harness.markdown(["x"], [[1]]))
    assert page.read_text() == "before\n<!-- one -->\n| x |\n| --- |\n| 1 |\n<!-- end -->\nafter\n"
    with pytest.raises(SystemExit, match="two"):
        harness.put("page.md", "<!-- two -->", "")
