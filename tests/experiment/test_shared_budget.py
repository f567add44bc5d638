"""`privacy.budget` in runs: refused before training, charged before what leaves, gone on with after an interruption."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedveil.experiment.run as module
from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.attacks.replay import replay
from fedveil.cli.app import app
from fedveil.errors import BudgetExhausted, ConfigError, LedgerError
from fedveil.experiment.config import Config, parse
from fedveil.experiment.config_files import load_config
from fedveil.experiment.run import run
from fedveil.ledger.budget import RdpFilter
from fedveil.ledger.ledger import Entry, Ledger
from fedveil.ledger.population_budget import create_budget, open_budget, spending
from fedveil.studies.twin import twin_sensitivity

SERVER = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER)
TOML = """
data = {{ name = "digits", partition = {{ kind = "iid", clients = 12 }} }}
model = {{ name = "linear" }}
method = {{ name = "{method}" }}
training = {{ rounds = 3, clients_per_round = {cohort}, batch_size = 64 }}
privacy = {{ epsilon = 2.0, delta = 1e-3, view = "{view}", budget = "people.budget" }}
run = {{ engine = "inline", name = "pilot" }}
"""


def config(folder: Path, view: str = "server", method: str = "dp-fedavg", cohort: int = 12, **sections: Any) -> Config:
    file = folder / "c.toml"
    file.write_text(TOML.format(view=view, method=method, cohort=cohort))
    keys = load_config(file).model_dump(mode="json")
    for section, values in sections.items():
        keys[section] |= values
    return parse(keys)


def rows(path: Path) -> list[Entry]:
    with Ledger.open(path) as ledger:
        return [row for _, _, row in ledger.entries()]


def test_the_path_is_that_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert config(tmp_path).privacy.budget == str(tmp_path / "people.budget")
    (tmp_path / "c.toml").write_text('privacy = { budget = "" }')
    with pytest.raises(ConfigError, match=r"privacy.budget = ''"):
        load_config(tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text("privacy = { budget = 3 }")
    with pytest.raises(ConfigError, match=r"privacy.budget = 3"):
        load_config(tmp_path / "c.toml")


def test_runs_are_charged_until_the_next_does_not_fit(tmp_path: Path) -> None:
    budget = create_budget(tmp_path / "people.budget", 3.2, 1e-3, SERVER)
    configuration = config(tmp_path)
    run(configuration, tmp_path / "one")
    own, shared = rows(tmp_path / "one" / "ledger.sqlite"), rows(budget.path)
    assert len(own) == 36
    assert {row.run for row in shared} == {f"pilot/{own[0].run}"}
    assert [(row.round, row.client, row.event) for row in shared] == [(row.round, row.client, row.event) for row in own]
    run(configuration, tmp_path / "two")
    with pytest.raises(BudgetExhausted) as caught:
        run(configuration, tmp_path / "three")
    assert "is left" in str(caught.value)
    assert not (tmp_path / "three").exists()
    found = spending(budget)
    assert (found.rows, found.clients, [project.runs for project in found.projects]) == (72, 12, [2])
    run(config(tmp_path, privacy={"epsilon": found.left}), tmp_path / "four")
    assert 0.999 < spending(budget).spent <= 1
    with pytest.raises(BudgetExhausted, match=r"0.0\d+% of client \d+ is left"):
        run(config(tmp_path, privacy={"epsilon": 0.1}), tmp_path / "five")


def test_the_command_is_refused_with_one_line(tmp_path: Path) -> None:
    create_budget(tmp_path / "people.budget", 1.0, 1e-3, SERVER)
    config(tmp_path)
    done = CliRunner().invoke(app, ["run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run")])
    assert isinstance(done.exception, BudgetExhausted)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        (Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE), "aggregate view"),
        (Scope(Unit.RECORD, Adjacency.ZERO_OUT, View.SERVER), "record level"),
        (Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER), "replace-one"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, scope: Scope, words: str) -> None:
    create_budget(tmp_path / "people.budget", 50.0, 1e-3, scope)
    with pytest.raises(ConfigError, match=f"{words}.*do not add up"):
        run(config(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_budget_and_seeded_noise_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="fedveil budget create"):
        run(config(tmp_path), tmp_path / "run")
    create_budget(tmp_path / "people.budget", 50.0, 1e-3, SERVER)
    with pytest.raises(ConfigError, match=r"run.seeded_noise = true"):
        run(config(tmp_path, run={"seeded_noise": True}), tmp_path / "run")
    with pytest.raises(BudgetExhausted, match="unbounded cost"):
        run(config(tmp_path, privacy={"epsilon": None, "noise_multiplier": 0.0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_run_has_reserved_is_not_spent_by_another(tmp_path: Path) -> None:
    budget = create_budget(tmp_path / "people.budget", 2.2, 1e-3, SERVER)
    other, refused = budget.ledger("other"), []

    def takes(record: Any) -> None:
        if record["round"] == 2:
            return
        with pytest.raises(BudgetExhausted, match="other runs have reserved") as caught:
            other.charge_all([next(row for row in rows(budget.path) if row.client == 4)])
        refused.append(caught.value)
        with pytest.raises(BudgetExhausted, match=r"is left \(other runs have reserved"):
            run(config(tmp_path), tmp_path / "late")
        other.close()

    ended = run(config(tmp_path), tmp_path / "two", takes)
    assert (ended.ended, len(refused)) == ("", 2)
    assert not (tmp_path / "late").exists()
    assert {row.run.partition("/")[0] for row in rows(budget.path)} == {"pilot"}
    assert spending(budget).reserved == ()


def test_a_run_that_stops_before_its_first_release_gives_back_what_it_reserved(tmp_path: Path) -> None:
    budget = create_budget(tmp_path / "people.budget", 2.2, 1e-3, SERVER)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ConfigError):
        run(config(tmp_path), tmp_path / "taken")
    assert spending(budget).reserved == ()
    assert run(config(tmp_path), tmp_path / "run").ended == ""


def test_an_interrupted_run_keeps_its_reservation_until_it_is_released(tmp_path: Path) -> None:
    budget = create_budget(tmp_path / "people.budget", 3.5, 1e-3, SERVER)
    run(config(tmp_path), tmp_path / "first")
    interrupted(config(tmp_path), tmp_path / "run")
    (kept,) = spending(budget).reserved
    assert 0 < kept.share < 0.25
    before = spending(budget).left
    output = CliRunner().invoke(app, ["budget", "show", str(budget.path)]).output
    assert f"reserved by {kept.run}" in output
    assert CliRunner().invoke(app, ["budget", "release", str(budget.path), kept.run]).exit_code == 0
    wrong = CliRunner().invoke(app, ["budget", "release", str(budget.path), kept.run])
    assert isinstance(wrong.exception, ConfigError)
    after = config(tmp_path, privacy={"epsilon": spending(budget).left})
    assert after.privacy.epsilon is not None
    assert after.privacy.epsilon > before
    assert run(after, tmp_path / "late").ended == ""
    with pytest.raises(BudgetExhausted):
        run(config(tmp_path), tmp_path / "run", resume=True)


def interrupted(configuration: Config, path: Path) -> None:
    """A run that ends between the charges of its second round and the checkpoint."""
    real = module.Checkpoints.begin

    def save(self: Any, progress: Any) -> None:
        if progress.round == 2:
            raise KeyboardInterrupt
        real(self, progress)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.Checkpoints, "begin", save)
        run(configuration, path)


def test_an_interrupted_round_with_fresh_noise_counts_twice(tmp_path: Path) -> None:
    budget = create_budget(tmp_path / "people.budget", 4.0, 1e-3, SERVER)
    configuration = config(tmp_path)
    interrupted(configuration, tmp_path / "run")
    assert "pilot" in CliRunner().invoke(app, ["budget", "show", str(budget.path)]).output
    resumed = run(configuration, tmp_path / "run", resume=True)
    own, shared = rows(tmp_path / "run" / "ledger.sqlite"), rows(budget.path)
    assert Counter(row.round for row in shared) == Counter(row.round for row in own)
    assert Counter(row.round for row in shared)[1] >= 12  # the own cap ends the run where a round had to be done again
    assert "exceed" in resumed.ended or "budget" in resumed.ended


def test_a_round_that_hands_over_the_same_bits_again_is_charged_once(tmp_path: Path) -> None:
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
    budget = create_budget(tmp_path / "people.budget", 4.0, 1e-3, scope)
    configuration = config(tmp_path, "aggregate", "banded-mf", 4, training={"sampling": "fixed"})
    interrupted(configuration, tmp_path / "run")
    assert len(rows(budget.path)) == 2
    resumed = run(configuration, tmp_path / "run", resume=True)
    assert (resumed.ended, [row.round for row in rows(budget.path)]) == ("", [0, 1, 2])


def test_a_run_is_resumed_when_only_its_own_share_is_left(tmp_path: Path) -> None:
    """The budget holds this run and no other: what it charged before it was interrupted is not asked for again."""
    create_budget(tmp_path / "people.budget", 2.4, 1e-3, SERVER)
    configuration = config(tmp_path)
    interrupted(configuration, tmp_path / "run")
    run(configuration, tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=r"privacy.budget was"):
        module.same_run(configuration, config(tmp_path, privacy={"budget": str(tmp_path / "other")}), tmp_path)


def test_sampled_rounds_by_an_order_that_a_configuration_suggests(tmp_path: Path) -> None:
    configuration = config(tmp_path, "aggregate", cohort=3)
    made = CliRunner().invoke(
        app,
        [
            "budget",
            "create",
            str(tmp_path / "people.budget"),
            "--epsilon",
            "3",
            "--delta",
            "1e-3",
            "--like",
            f"{tmp_path}/c.toml",
        ],
    )
    assert made.exit_code == 0, made.output
    budget = open_budget(tmp_path / "people.budget")
    assert isinstance(budget.cap, RdpFilter)
    assert budget.scope.view is View.AGGREGATE
    run(configuration, tmp_path / "run")
    assert [(row.client, row.round) for row in rows(budget.path)] == [(-1, 0), (-1, 1), (-1, 2)]
    assert 0 < spending(budget).epsilon < 3
    with pytest.raises(ConfigError, match="server view"):
        run(config(tmp_path), tmp_path / "other")


def test_simulations_charge_nothing(tmp_path: Path) -> None:
    """Twins and replays show nothing of the releases to anybody under the budget; they go without it."""
    configuration = config(tmp_path)
    twin_sensitivity(configuration, 0)
    assert replay(configuration, rounds=1).findings == {}
    budget = create_budget(tmp_path / "people.budget", 4.0, 1e-3, SERVER)
    twin_sensitivity(configuration, 0)
    assert rows(budget.path) == []


def test_a_pool_shares_it(tmp_path: Path) -> None:
    budget = create_budget(tmp_path / "people.budget", 4.0, 1e-3, SERVER)
    run(config(tmp_path, run={"engine": "pool"}), tmp_path / "run")
    own = rows(tmp_path / "run" / "ledger.sqlite")
    keys = [sorted((row.round, row.client) for row in each) for each in (rows(budget.path), own)]
    assert keys[0] == keys[1] == [(t, c) for t in range(3) for c in range(12)]
