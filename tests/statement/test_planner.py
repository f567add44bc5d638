"""The planner: each row costs what was asked for, and its noise is what the statement of that row says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedveil.accounting.learnability import expected_share
from fedveil.accounting.types import Unit
from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config, plan_table
from fedveil.experiment.config import Config, configure
from fedveil.statement.statement_text import gathered_in_words


def config(**changes: Any) -> Config:
    sections: dict[str, Any] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 40}},
        "model": {"name": "linear"},
        "method": {"name": "dp-fedavg", "clip": 0.5},
        "training": {"rounds": 8, "clients_per_round": 10, "example_clip": 1.0},
        "privacy": {"epsilon": 4.0, "delta": 1e-3},
    }
    return configure(**{name: {**section, **changes.get(name, {})} for name, section in sections.items()})


def test_rows_agree_with_the_statement_of_their_configuration() -> None:
    rows = [row for row in plan_table(config()) if not row.why_not]
    assert {(row.rounds, row.cohort) for row in rows if row.unit is Unit.CLIENT} == {
        (t, n) for t in (2, 4, 8, 16) for n in (5, 10, 20, 40)
    }
    for row in rows[::7]:
        if row.unit is Unit.CLIENT:
            stated = certify_config(config(training={"rounds": row.rounds, "clients_per_round": row.cohort}))
            assert stated.proven.epsilon == pytest.approx(4.0, rel=1e-3)
            assert stated.noise_multiplier == pytest.approx(row.noise_multiplier)
            assert stated.learnability is not None
            ratio = stated.learnability.level(stated.scope.view).ratio
            assert ratio is not None
            assert row.gathered == pytest.approx(ratio / math.sqrt(row.rounds))
            assert row.share == expected_share(row.gathered)


def test_best_first_and_what_cannot_be_had_last() -> None:
    rows = plan_table(config())
    possible = [row.gathered for row in rows if not row.why_not]
    assert possible == sorted(possible)
    assert [bool(row.why_not) for row in rows] == sorted(bool(row.why_not) for row in rows)


def test_a_plan_needs_a_guarantee() -> None:
    with pytest.raises(ConfigError, match=r"set privacy\.epsilon"):
        plan_table(config(privacy={"epsilon": None, "noise_multiplier": 1.0}))


def test_the_program_prints_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[data]\npartition = { kind = "iid", clients = 20 }\n[model]\nname = "linear"\n[method]\nname = "dp-fedavg"\n'
        "[training]\nrounds = 4\n[privacy]\nepsilon = 8.0\ndelta = 1e-3\n"
    )
    done = CliRunner().invoke(app, ["plan", str(file)])
    assert done.exit_code == 0, done.output
    assert "clients: per round" in done.output
    assert "%" in done.output


@pytest.mark.parametrize(("epsilon", "said"), [(0.1, True), (200.0, False)])
def test_a_hopeless_verdict_points_to_single_records(epsilon: float, said: bool) -> None:
    block = certify_config(config(privacy={"epsilon": epsilon})).learnability
    assert block is not None
    assert ("fedveil plan shows both units" in gathered_in_words(block)) is said


def test_a_run_says_before_it_trains_whether_it_can_learn(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[data]\npartition = { kind = "iid", clients = 20 }\n[model]\nname = "linear"\n[method]\nname = "dp-fedavg"\n'
        "[training]\nrounds = 2\n[privacy]\nepsilon = 8.0\ndelta = 1e-3\n"
    )
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "Can it learn?" in done.output
    assert done.output.index("Can it learn?") < done.output.index("accuracy")
