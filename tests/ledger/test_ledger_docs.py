"""docs/ledger.md says what the code does: its example runs, its SQL runs, its table of columns is the schema."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.accounting.types import SampledGaussian, Unbounded, View
from fedveil.ledger.ledger import Ledger

PAGE = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ledger that the page's Python example writes, and three more releases."""
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("python")
    exec(compile(example, "docs/ledger.md", "exec"), {})
    with Ledger.open("ledger.db") as ledger:
        (upload,) = (entry for _, _, entry in ledger.entries())
        ledger.charge(replace(upload, client=8))
        ledger.charge(replace(upload, client=-1, view=View.AGGREGATE, event=SampledGaussian(0.1, 2.0, 3)))
        ledger.charge(replace(upload, event=Unbounded("read the loss"), reads=("loss",)))
    return tmp_path / "ledger.db"


def test_every_query_of_the_page_answers(path: Path) -> None:
    costs, unproven, sampled, development = blocks("sql")
    with closing(sqlite3.connect(path)) as db:
        assert [row[:3] for row in db.execute(costs)] == [(7, "server", 1), (8, "server", 1)]
        assert db.execute(unproven).fetchall() == [(0, 7, "read the loss", '["loss"]')]
        assert db.execute(sampled).fetchall() == [("aggregate", 0.1, 2.0, 3)]
        assert len(db.execute(development).fetchall()) == 4


def test_the_table_of_columns_is_the_schema(path: Path) -> None:
    documented = re.findall(r"^\| (\w+) \| (INTEGER|REAL|TEXT) \|", PAGE, re.MULTILINE)
    with closing(sqlite3.connect(path)) as db:
        assert documented == [(name, kind) for _, name, kind, *_ in db.execute("PRAGMA table_info(release)")]
        keys = {key for (key,) in db.execute("SELECT key FROM meta")}
    assert keys == {"run", "created", "schema", "fedveil", "meta"}
