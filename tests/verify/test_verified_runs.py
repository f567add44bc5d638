"""Runs as they are made verify: six kinds, every method and variant in each view, resumed, published, zipped."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from federation_runs import config, covering, every_method
from fedveil.accounting.types import at_most
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import configure, parse
from fedveil.experiment.config_files import load_config
from fedveil.experiment.new_project import demo_config
from fedveil.experiment.published_copy import publish
from fedveil.experiment.run import run as train
from fedveil.ledger.ledger import Ledger
from fedveil.statement.statement_layout import to_dict, to_markdown
from fedveil.verify import verify_run
from fedveil.verify.finding import Findings
from fedveil.verify.second_path import gaussian_epsilon
from fedveil.verify.statement_checks import check_statement
from forged_ledger import ForgedLedger
from honest_runs import table
from resumed_runs import case, go, interrupted
from verified_runs import KINDS, made, small_run

pytestmark = pytest.mark.heavy


def wrong(run: Path, pin: str | None = None) -> list[str]:
    """What keeps a run from being verified."""
    return [f"{f.subject}: {f.text}" for f in verify_run(run, pin=pin).findings if f.kind in ("contradicted", "unknown")]


@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_each_kind_verifies(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = made(tmp_path_factory, name)
    with Ledger.open(run / "ledger.sqlite") as ledger:
        assert ledger.closing is not None
        assert wrong(run, pin=ledger.closing[1]) == []
    assert wrong(run, pin="0" * 64) != []


RUNS = dict(every_method())


@pytest.mark.few(6)
@pytest.mark.parametrize("name", covering(RUNS, 3))
def test_every_method_verifies(name: str, tmp_path: Path) -> None:
    assert wrong(small_run(RUNS[name], tmp_path / "run")) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dp-fedavg aggregate", "noisy-fedavg", "banded-mf"])
def test_a_run_that_was_interrupted_and_resumed_verifies(name: str, tmp_path: Path) -> None:
    configuration = case(name)
    interrupted(configuration, tmp_path / "run", 3)
    assert verify_run(tmp_path / "run").exit_status == 2, "not closed yet"
    go(configuration, tmp_path / "run", resume=True)
    assert wrong(tmp_path / "run") == []


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_steps_of_dp_sgd_verify_and_steps_with_too_low_a_cost_do_not(view: str, tmp_path: Path) -> None:
    records = {"unit": "record", "delta": 1e-5}
    run = small_run(config({"name": "dp-fedavg"}, view, training={"local": "dp-sgd"}, privacy=records), tmp_path / "run")
    assert wrong(run) == []
    ledger = ForgedLedger.read(run)
    for row in ledger.rows:
        row["noise_multiplier"] *= 1.02
    ledger.write(coherent=True)
    assert any("its clip, noise and coordinates give" in problem for problem in wrong(run))


def test_a_published_copy_verifies(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = made(tmp_path_factory, "banded")
    copy = publish(source, tmp_path / "copy")
    assert wrong(copy) == []
    assert verify_run(copy).closing == verify_run(source).closing
    assert any("as published" in finding.text for finding in verify_run(copy).findings)


def test_figures_that_were_laid_beside_a_run_are_contradicted(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A page shows them as the run's own, and the accuracies of a private table in the place of the public ones."""
    copy = publish(made(tmp_path_factory, "server"), tmp_path / "copy")
    pin = verify_run(copy).closing
    for name in ("private/history.csv", "Private/layers.csv", "columns.json", "clients.csv", "partition.json"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("round,test_accuracy\n0,0.99\n1,0.99\n2,0.99\n")
        assert any(f"{name} (without a digest)" in problem for problem in wrong(copy, pin))
        (copy / name).rename(copy / "notes.csv")
        assert wrong(copy, pin) == []


def test_a_published_copy_of_a_sum_with_noise_in_shares_verifies(tmp_path: Path) -> None:
    run = small_run(config({"name": "noisy-fedavg", "variant": "proven"}, "aggregate"), tmp_path / "run")
    assert wrong(publish(run, tmp_path / "copy")) == []


CONFIGURATIONS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.few(3)
@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda file: file.stem)
def test_the_page_of_an_honest_statement_has_its_numbers(file: Path) -> None:
    statement, findings = certify_config(load_config(file)), Findings()
    check_statement(findings, json.loads(json.dumps(to_dict(statement))), to_markdown(statement))
    assert [finding for finding in findings if finding.kind != "verified"] == []


@pytest.mark.few(4)
@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.parametrize("clients", [2, 5, 20])
@pytest.mark.parametrize(("data", "model"), [("digits", "mlp"), ("mnist", "lenet5"), ("cifar10", "resnet18")])
def test_statements_of_small_federations_with_large_networks_agree_with_their_pages(
    view: str, clients: int, data: str, model: str
) -> None:
    """Their advice counts clients in seven digits and more."""
    sections = {
        "data": {"name": data, "partition": {"kind": "iid", "clients": clients}},
        "model": {"name": model},
        "method": {"name": "dp-fedavg"},
        "training": {"rounds": 20, "local_steps": 1},
        "privacy": {"epsilon": 1.0, "delta": 1e-3, "view": view},
    }
    statement, findings = certify_config(parse(sections)), Findings()
    check_statement(findings, json.loads(json.dumps(to_dict(statement))), to_markdown(statement))
    assert [finding for finding in findings if finding.kind != "verified"] == []


@pytest.mark.parametrize(("multiplier", "dearer"), [(0.38, 3e-5), (0.4, 1e-6)])
def test_what_the_sampler_adds_to_delta_is_charged_and_no_contradiction(multiplier: float, dearer: float) -> None:
    """At epsilon 47 the sampler's distance from Gaussian noise counts e^47 times, which is seen in the fifth digit."""
    sections = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 3}},
        "model": {"name": "linear"},
        "method": {"name": "dp-fedavg"},
        "training": {"rounds": 6, "batch_size": 600, "local_steps": 1, "local": "dp-sgd", "example_clip": 1.0},
        "privacy": {"unit": "record", "noise_multiplier": multiplier, "delta": 1e-5, "view": "final"},
    }
    statement, findings = to_dict(certify_config(parse(sections))), Findings()
    (release,), epsilon = statement["views"][2]["releases"], statement["views"][2]["proven"]["epsilon"]
    assert epsilon / gaussian_epsilon(math.sqrt(6) / release["noise_multiplier"], 1e-5) > 1 + dearer
    page = to_markdown(certify_config(parse(sections)))
    check_statement(findings, json.loads(json.dumps(statement)), page)
    assert [finding for finding in findings if finding.kind != "verified"] == []
    for view in statement["views"]:  # as if 3 % of delta were charged
        view["proven"]["epsilon"] = gaussian_epsilon(math.sqrt(6) / release["noise_multiplier"], 0.97e-5)
    check_statement(findings, json.loads(json.dumps(statement)), page)
    assert [finding for finding in findings if finding.kind == "contradicted"] != []


def test_a_large_target_is_not_passed_by_what_the_sampler_adds() -> None:
    sections = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 33}},
        "model": {"name": "linear"},
        "method": {"name": "dp-fedavg"},
        "training": {"rounds": 6},
        "privacy": {"epsilon": 50.0, "delta": 1e-7, "view": "aggregate"},
    }
    assert 49.99 < certify_config(parse(sections)).proven.epsilon <= 50


def test_a_run_without_noise_verifies_with_a_round_of_nobody(tmp_path: Path) -> None:
    """Where nothing is promised such a round releases nothing, and the ledger has no row of it."""
    sections = {"data": {"partition": {"kind": "iid", "clients": 4}}, "training": {"sampling": "poisson", "clients_per_round": 1}}
    run = train(config({"name": "fedavg"}, **sections, run={"seed": 4}), tmp_path / "run").path
    with Ledger.open(run / "ledger.sqlite") as ledger:
        assert len({entry.round for _, _, entry in ledger.entries()}) < 3
    assert wrong(run) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("delta", [1e-3, 1e-13])
def test_steps_with_so_much_noise_that_the_grid_counts_verify(delta: float, tmp_path: Path) -> None:
    """Each coordinate is rounded to 2^-24 of the noise, which costs more than one per cent of the clip; epsilon is 0 for one."""
    privacy = {"unit": "record", "delta": delta, "noise_multiplier": 40000.0, "epsilon": None}
    run = small_run(config({"name": "dp-fedavg"}, "final", training={"local": "dp-sgd"}, privacy=privacy), tmp_path / "run")
    with Ledger.open(run / "ledger.sqlite") as ledger:
        row = next(entry for _, _, entry in ledger.entries())
    assert row.event.noise_multiplier < 0.99 * row.noise_std[0] / row.clip[0]
    assert wrong(run) == []


def test_steps_whose_price_follows_their_clip_verify(tmp_path: Path) -> None:
    """A round with a smaller clip pays less for the grid than the plan, by 1.6 millionths of epsilon here."""
    privacy = {"unit": "record", "adjacency": "replace_one", "epsilon": 0.1, "delta": 5e-3, "allow_vacuous_delta": True}
    local = {"local": "dp-sgd", "example_clip": 0.3, "local_steps": 2, "batch_size": 4, "optimizer": {"lr": 1 / 3}}
    adaptive = {
        "method": {"name": "adap-dp-fl", "variant": "published"},
        "model": "linear",
        "training": {"rounds": 4, "clients_per_round": 3, "sampling": "poisson", **local},
        "privacy": {"view": "aggregate", **privacy},
        "run": {"seed": 1, "engine": "inline"},
    }
    train(configure(**adaptive), tmp_path / "run", data=table(random.Random(2), "classification", 21))
    assert wrong(tmp_path / "run") == []


def test_a_published_copy_of_a_run_that_released_nothing_verifies(tmp_path: Path) -> None:
    training = {"sampling": "poisson", "clients_per_round": 1, "rounds": 1, "local_steps": 1}
    sections = {"data": {"partition": {"kind": "iid", "clients": 9}}, "training": training}
    run = train(config({"name": "fedavg"}, **sections, run={"seed": 2}), tmp_path / "run").path
    with Ledger.open(run / "ledger.sqlite") as ledger:
        assert len(ledger) == 0
    assert wrong(run) == wrong(publish(run, tmp_path / "copy")) == []
    (run / "private" / "history.csv").unlink()
    assert wrong(run) == ["files: private/history.csv is gone"]


def test_a_proven_number_on_the_page_is_rounded_up_and_no_lower_one_passes() -> None:
    privacy = {"noise_multiplier": 2.0, "delta": 1e-5, "view": "aggregate"}
    training = {"rounds": 16, "clients_per_round": 50}
    data = {"name": "digits", "partition": {"kind": "iid", "clients": 200}}
    method, model = {"name": "dp-fedavg", "clip": 0.5}, {"name": "linear"}
    statement = certify_config(parse({"method": method, "model": model, "data": data, "training": training, "privacy": privacy}))
    page, shown = to_markdown(statement), at_most(statement.proven.epsilon)
    assert shown != f"{statement.proven.epsilon:.4g}"
    for text, wrong in ((page, 0), (page.replace(shown, f"{float(shown) - 0.002:.4g}"), 1)):
        findings = Findings()
        check_statement(findings, json.loads(json.dumps(to_dict(statement))), text)
        assert len([finding for finding in findings if finding.kind == "contradicted"]) == wrong


@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_the_first_run_of_a_newcomer_verifies(rounds: int, tmp_path: Path) -> None:
    demo = demo_config()
    assert demo.training.rounds == 40
    shorter = demo.model_copy(update={"training": demo.training.model_copy(update={"rounds": rounds})})
    assert wrong(train(shorter, tmp_path / "run").path) == []
