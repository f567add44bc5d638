"""Statements of whole configurations: exact values in each view, reasons, refusals, learnability, and no torch."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

import fedveil as fv
from federation_runs import config, small_digits
from fedveil.accounting.accountant import bound
from fedveil.accounting.gaussian import epsilon_of, mu_of, tpr
from fedveil.accounting.learnability import Learnability
from fedveil.accounting.types import Adjacency, Audit, Claim, Event, SampledGaussian, Scope, Unit, View
from fedveil.data.catalogue import info
from fedveil.data.dataset import Dataset
from fedveil.data.partition import ClientIndices, Partition, partition
from fedveil.data.split import client_test_split, split_within_users
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import parse
from fedveil.methods.base import MethodConfig
from fedveil.methods.fedavg import DPFedAvg, FedAvg
from fedveil.methods.method_registry import METHODS
from fedveil.methods.setting import Setting
from fedveil.papers.aldp_fl.method import ALDPFL
from fedveil.statement.statement import SIMULATION_ONLY, VIEWS, Statement
from fedveil.statement.statement_layout import from_dict, render, render_brief, to_dict, to_markdown
from fedveil.statement.statement_text import in_words, numbers_table

DELTA = 1e-5


def stated(method: MethodConfig, *, clients: int = 200, network: nn.Module | str = "linear", **keys: Any) -> Statement:
    """The statement of 200 clients of 40 records, 50 a round, and 3,600 parameters; keys of training and privacy change it."""
    training: dict[str, Any] = {"clients_per_round": 50, "rounds": 16, "sampling": "fixed", "batch_size": 10}
    privacy: dict[str, Any] = {"noise_multiplier": None if "epsilon" in keys else 2.0, "delta": DELTA}
    run = {"seeded_noise": keys.pop("seeded_noise", False)}
    for key, value in keys.items():
        (training if key in fv.Training.model_fields else privacy)[key] = value
    data = {"partition": {"kind": "iid", "clients": clients}}
    x, y = np.broadcast_to(np.float32(0), (40 * clients, 359)), np.zeros(40 * clients, np.int64)
    examples = fv.Dataset(replace(info("digits"), name="zeros", input_shape=(359,)), x, y, x[:1], y[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, method.name, type(method))
        federation = fv.Federation(model=network, method=method, training=training, privacy=privacy, data=data, run=run)
        return federation.certify(examples)


BY_RECORD: dict[str, Any] = {"view": "server", "unit": "record", "local": "dp-sgd"}


def epsilons(s: Statement) -> list[float]:
    return [s.view(v).proven.epsilon for v in VIEWS]


# --- the proven number in each view -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_aggregate_runs_compose_exactly_and_prove_nothing_against_the_server(adjacency: Adjacency) -> None:
    s = stated(DPFedAvg(clip=3.0), adjacency=adjacency)
    mu = adjacency.factor * math.sqrt(16) / 2.0
    assert epsilons(s) == [math.inf, *[pytest.approx(epsilon_of(mu, DELTA), rel=1e-9)] * 2]
    assert "only their sum is protected" in s.view(View.SERVER).proven.reason
    assert s.view(View.SERVER).tpr == 1.0
    assert s.own.mu == pytest.approx(mu, rel=1e-12)
    assert s.own.tpr == pytest.approx(tpr(mu, 0.05), rel=1e-12)
    assert s.accountant == "gdp"


def test_server_runs_gain_the_other_uploads_noise_in_the_sum() -> None:
    s = stated(DPFedAvg(), view="server", min_survivors=40, colluders=4)
    alone, summed = math.sqrt(16) / 2.0, math.sqrt(16) / (2.0 * math.sqrt(36))
    expected = [epsilon_of(mu, DELTA) for mu in (alone, summed, summed)]
    assert epsilons(s) == pytest.approx(expected, rel=1e-9)


def test_poisson_sampling_is_credited_in_the_views_that_do_not_see_it() -> None:
    s = stated(DPFedAvg(), sampling="poisson")
    expected, name = bound([SampledGaussian(0.25, 2.0, 16)], DELTA, adjacency=Adjacency.ZERO_OUT)
    assert epsilons(s) == [math.inf, expected, expected]
    assert s.accountant == name
    assert expected < epsilon_of(math.sqrt(16) / 2.0, DELTA)
    assert any("independently with probability 0.25" in a.what for a in s.assumptions)
    server = stated(DPFedAvg(), view="server", sampling="poisson")
    full = epsilon_of(math.sqrt(16) / 2.0, DELTA)
    assert epsilons(server) == pytest.approx([full] * 3, rel=1e-9), "who takes part is seen: no amplification in any view"


def test_a_target_is_calibrated_to() -> None:
    s = stated(DPFedAvg(), epsilon=3.0)
    assert s.target_epsilon == 3.0
    assert s.proven.epsilon == pytest.approx(3.0, rel=1e-4)
    assert s.proven.epsilon <= 3.0
    assert s.noise_multiplier == pytest.approx(math.sqrt(16) / mu_of(3.0, DELTA), rel=1e-4)


def test_dp_sgd_protects_records_in_every_view_and_clients_in_none() -> None:
    records = stated(FedAvg(), **BY_RECORD, example_clip=1.0)
    exact, rounded = (
        bound([SampledGaussian(0.25, 2.0 / c, 4 * 16)], DELTA, adjacency=Adjacency.ZERO_OUT)[0] for c in (1, 1.00001)
    )
    assert len(set(epsilons(records))) == 1
    assert exact < records.proven.epsilon < rounded, "the grid adds a little to the sensitivity of 1"
    assert any("who joined never leaves the client" in a.what for a in records.assumptions)
    clients = stated(FedAvg(), view="server", local="dp-sgd", example_clip=1.0)
    assert epsilons(clients) == [math.inf] * 3
    assert all("protects records, not the client" in v.proven.reason for v in clients.views)


@pytest.mark.parametrize("method", ["fedavg", "dp-fedavg"])
def test_a_target_that_no_noise_reaches_is_refused_with_its_reason(method: str) -> None:
    """Fewer rounds or a larger epsilon, which were advised, change nothing."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 10}},
        "model": {"name": "linear"},
        "method": {"name": method},
        "training": {"rounds": 2, "local": "dp-sgd"},
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
    }
    with pytest.raises(ConfigError, match=r"no noise reaches it, for DP-SGD inside a client protects records, .*privacy.unit"):
        certify_config(parse(sections))
    sections["privacy"]["unit"] = "record"
    assert certify_config(parse(sections)).proven.epsilon <= 8
    sections |= {"training": {"rounds": 2}, "method": {"name": "dp-fedavg"}, "privacy": {"epsilon": 8.0, "delta": 1e-4}}
    assert certify_config(parse(sections)).proven.epsilon <= 8


def test_without_noise_or_clip_every_view_is_inf_with_its_reason() -> None:
    bare = stated(FedAvg(), noise_multiplier=None)
    assert epsilons(bare) == [math.inf] * 3
    assert {v.proven.reason for v in bare.views} == {"fedavg neither clips nor adds noise"}
    assert bare.learnability is None
    assert bare.assumptions == ()
    silent = stated(DPFedAvg(), noise_multiplier=0.0)
    assert {v.proven.reason for v in silent.views} == {"no noise is added (noise_multiplier = 0)"}
    with pytest.raises(ConfigError, match="noise is not set"):
        stated(DPFedAvg(), noise_multiplier=None)


class Claims(DPFedAvg):
    """A method whose paper claims something of the last model."""

    variant: str = "published"

    def claim(self, s: Setting) -> Claim:
        return Claim(0.5, s.delta, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.FINAL), "a theorem")

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        return ("the moon is full",)


def test_a_claim_stands_in_its_own_view_and_an_audit_refutes_it() -> None:
    s = stated(Claims(), delta=0.1)
    assert s.variant == "published"
    assert [v.claimed is not None for v in s.views] == [False, False, True]
    assert ("the moon is full", "the bound of dp-fedavg rests on it") in [(a.what, a.why) for a in s.assumptions]
    assert "the moon is full" in s.proven.assumptions
    found = Audit(0.7, 0.1, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.FINAL), "two worlds", 0.95, 500)
    audited = s.with_audits([found])
    assert [c.number for c in audited.contradictions()] == ["claimed"]
    assert "REFUTED" in shown(audited)


# --- nonsense -----------------------------------------------------------------------------------------------------------------


class CreditsSampling(DPFedAvg):
    """A method that wrongly credits sampling in every view."""

    def releases(self, s: Setting, view: View) -> list[Event]:
        return [SampledGaussian(s.rate, s.z, s.rounds)]


def test_wrong_credit_for_sampling_is_refused() -> None:
    with pytest.raises(ConfigError, match="in the server view"):
        stated(CreditsSampling(), view="server", sampling="poisson")
    with pytest.raises(ConfigError, match="in the server view"):
        stated(CreditsSampling(), sampling="poisson")


def test_a_vacuous_delta_warns_and_is_refused_where_something_is_proven() -> None:
    with pytest.raises(ConfigError, match="allow_vacuous_delta"):
        stated(DPFedAvg(), delta=1 / 200)
    allowed = stated(DPFedAvg(), delta=1 / 200, allow_vacuous_delta=True)
    assert any("not below 1 / 200 (the number of clients)" in w for w in allowed.warnings)
    assert any("not below" in w for w in stated(Claims(), delta=1 / 200).warnings), "published: a warning"
    assert any("not below" in w for w in stated(FedAvg(), delta=0.1, noise_multiplier=None).warnings)
    assert stated(FedAvg(), **BY_RECORD, delta=1 / 8001).units == 200 * 40, "units are records here"
    with pytest.raises(ConfigError, match="1 / 8000"):
        stated(FedAvg(), **BY_RECORD, delta=1 / 8000)


def test_records_under_a_client_level_mechanism() -> None:
    for adjacency in Adjacency:
        s = stated(DPFedAvg(), unit="record", adjacency=adjacency)
        assert s.proven.epsilon == pytest.approx(epsilon_of(2 * math.sqrt(16) / 2.0, DELTA), rel=1e-9)
        assert any("all records of its client together" in note for note in s.notes)
        sampled = stated(DPFedAvg(), unit="record", adjacency=adjacency, sampling="poisson")
        expected, _ = bound([SampledGaussian(0.25, 1.0, 16)], DELTA, adjacency=Adjacency.REPLACE_ONE)
        assert sampled.proven.epsilon == expected
    zeroing, _ = bound([SampledGaussian(0.25, 1.0, 16)], DELTA, adjacency=Adjacency.ZERO_OUT)
    assert zeroing != pytest.approx(expected, rel=0.01), "the two pairs differ, so that the choice matters"


def test_seeded_noise_and_what_is_not_protected() -> None:
    s = stated(DPFedAvg(), seeded_noise=True, network=nn.Sequential(nn.Linear(1, 3598), nn.BatchNorm1d(1)))
    assert s.warnings[0] == SIMULATION_ONLY == "simulation only: noise is reproducible, no privacy"
    assert in_words(s).startswith("Simulation only")
    assert SIMULATION_ONLY in to_markdown(s)
    lines = " ".join(s.not_protected)
    for topic in ("participation", "sizes", "batch-norm", "hyper-parameter", "training loss"):
        assert topic in lines
    assert "batch-norm" not in " ".join(stated(DPFedAvg()).not_protected)
    assert SIMULATION_ONLY not in stated(DPFedAvg()).warnings


def test_no_heading_says_proven_over_nothing_proven() -> None:
    def headings(s: Statement) -> set[str]:
        file = io.StringIO()
        render(s, Console(file=file, width=200))
        render_brief(s, Console(file=file, width=200))
        lines = [line for line in (*file.getvalue().splitlines(), *to_markdown(s).splitlines()) if "Privacy statement" in line]
        lines += [line for line in to_markdown(s).splitlines() if line.startswith("# ")]
        assert len(lines) > 2
        return {line[line.index("(") + 1 : line.index(")")] for line in lines}

    assert headings(stated(DPFedAvg())) == {"proven"}
    assert headings(stated(DPFedAvg(), seeded_noise=True)) == {"simulation only"}
    assert headings(stated(DPFedAvg(), noise_multiplier=0.0)) == {"nothing proven"}
    assert headings(stated(FedAvg(), noise_multiplier=None)) == {"nothing proven"}
    assert headings(stated(ALDPFL(variant="published"), view="server", epsilon=8.0)) == {"published"}


# --- can it learn? --------------------------------------------------------------------------------------------------------------


def block(method: MethodConfig, **keys: Any) -> Learnability:
    found = stated(method, **keys).learnability
    assert found is not None
    return found


def test_noise_norms_by_hand() -> None:
    d, n, clip = 3600, 50, 3.0
    aggregate = block(DPFedAvg(clip=clip))
    own = aggregate.level(View.AGGREGATE)
    assert own.noise_norm == pytest.approx(2.0 * clip * math.sqrt(d) / n, rel=1e-9)
    assert own.ratio == pytest.approx(2.0 * 60 / 50, rel=1e-9)
    assert aggregate.level(View.FINAL).ratio == pytest.approx(2.0 * 60 / 50, rel=1e-9)
    assert aggregate.level(View.SERVER).ratio == pytest.approx(2.0 * math.sqrt(d / n), rel=1e-3), "same z, noise on each upload"
    server = block(DPFedAvg(clip=clip), view="server")
    assert server.level(View.SERVER).noise_norm == pytest.approx(2.0 * clip * math.sqrt(d / n), rel=1e-9)
    assert server.level(View.AGGREGATE).ratio == pytest.approx(2.0 * 60 / 50, rel=1e-3)
    assert (aggregate.verdict, server.verdict) == ("yes", "no")


def test_noise_norm_of_a_dp_sgd_step_by_hand() -> None:
    s = block(FedAvg(), **BY_RECORD, example_clip=0.5)
    for view in VIEWS:
        assert s.level(view).noise_norm == pytest.approx(2.0 * 0.5 / 10 * math.sqrt(3600 / 50), rel=1e-9)
        assert s.level(view).ratio == pytest.approx(2.0 / 10 * math.sqrt(72), rel=1e-9)


CASES: list[tuple[MethodConfig, dict[str, Any]]] = [
    (DPFedAvg(), {}),
    (DPFedAvg(), {"view": "server"}),
    (DPFedAvg(), {"adjacency": "replace_one", "clients_per_round": 100}),
    (DPFedAvg(), {"epsilon": 6.0, "sampling": "poisson", "clients_per_round": 20}),
    (DPFedAvg(), {"epsilon": 8.0, "sampling": "poisson", "clients": 5000, "clients_per_round": 20}),
    (FedAvg(), {**BY_RECORD, "example_clip": 0.5, "noise_multiplier": 1.5, "rounds": 40}),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("method", "keys"), CASES)
@pytest.mark.heavy
def test_following_the_advice_reaches_the_ratio_at_the_same_epsilon(method: MethodConfig, keys: dict[str, Any]) -> None:
    before = stated(method, **keys)
    start = before.learnability
    assert start is not None
    own = start.level(before.scope.view)
    assert own.ratio is not None
    assert own.ratio > 1
    assert [a.change for a in start.advice] == ["clients a round", "rounds", "dimension"]
    target = {**keys, "noise_multiplier": None, "epsilon": start.epsilon}
    for advice in start.advice:
        if advice.to is None:
            continue
        moved: dict[str, Any] = {
            "clients a round": {"clients_per_round": advice.to, "clients": advice.clients},
            "rounds": {"rounds": advice.to},
            "dimension": {"network": nn.Linear(1, advice.to, bias=False)},
        }[advice.change]
        after = stated(method, **target | moved)
        reached = after.learnability
        assert after.proven.epsilon <= start.epsilon * (1 + 1e-9)
        assert reached is not None
        ratio = reached.level(before.scope.view).ratio
        assert ratio is not None
        assert 0.8 < ratio <= 1 + 2e-5, (advice, ratio)
        assert reached.advice == () or ratio > 1
    assert any(a.to is not None for a in start.advice)


def test_clients_are_sought_in_the_population_first_and_the_answer_is_the_least() -> None:
    found = block(DPFedAvg()).advice[0]
    assert (found.to, found.clients) == (120, 200), "z sqrt(d) = 2 * 60"
    small = block(DPFedAvg(), clients=60, clients_per_round=50).advice[0]
    assert (small.to, small.clients) == (120, 144)
    assert "population of 144 clients instead of 60" in small.text


def test_advice_that_cannot_work_is_said_to_be_impossible() -> None:
    hopeless = block(DPFedAvg(), view="server", noise_multiplier=100.0)
    assert [a.to for a in hopeless.advice[1:]] == [None, None]
    assert hopeless.advice[0].to == 100**2 * 3600
    assert block(DPFedAvg(), clients_per_round=200).advice == ()


def test_no_learnability_without_clip_noise_or_finite_epsilon() -> None:
    assert stated(FedAvg(), noise_multiplier=None).learnability is None
    assert stated(DPFedAvg(), noise_multiplier=0.0).learnability is None
    assert stated(FedAvg(), local="dp-sgd").learnability is None, "epsilon is inf: it protects no clients"


# --- whole configurations ------------------------------------------------------------------------------------------------------


CONFIG = {
    "data": {"name": "fashion-mnist", "partition": {"kind": "iid", "clients": 20}},
    "model": {"name": "lenet5"},
    "method": {"name": "dp-fedavg"},
    "training": {"rounds": 10**6, "clients_per_round": 10, "sampling": "poisson"},
    "privacy": {"epsilon": 8.0, "delta": 1e-5},
}


def configured(*overrides: str) -> Statement:
    return certify_config(parse(json.loads(json.dumps(CONFIG)), list(overrides)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["privacy.view=server"],
        ["method={name='fedavg', weighting='uniform'}", "training.local=dp-sgd", "privacy.unit=record"],
    ],
)
@pytest.mark.heavy
def test_json_round_trip_of_real_statements(overrides: list[str]) -> None:
    s = configured(*overrides)
    assert from_dict(json.loads(json.dumps(to_dict(s), allow_nan=False))) == s
    assert s.proven.epsilon == pytest.approx(8.0, rel=1e-3)
    assert s.proven.epsilon <= 8.0


def test_batch_norm_is_named_only_where_there_is_any() -> None:
    resnet = ["data.name=cifar10", "training.rounds=3", "privacy.view=server"]
    plain = certify_config(parse({**json.loads(json.dumps(CONFIG)), "model": {"name": "resnet18"}}, resnet))
    batch = certify_config(parse({**json.loads(json.dumps(CONFIG)), "model": {"name": "resnet18", "norm": "batch"}}, resnet))
    assert not any("batch-norm" in line for line in plain.not_protected)
    assert any(line.startswith("batch-norm statistics:") and "stay on the client" in line for line in batch.not_protected)


@pytest.mark.heavy
def test_a_million_rounds_need_no_torch() -> None:
    code = (
        "import sys, json\n"
        "from fedveil.experiment.certify import certify_config\n"
        "from fedveil.statement.statement_layout import render\n"
        "from fedveil.statement.statement_layout import to_markdown\n"
        "from fedveil.experiment.config import parse\n"
        "from rich.console import Console\n"
        f"s = certify_config(parse(json.loads({json.dumps(json.dumps(CONFIG))})))\n"
        "render(s, Console())\n"
        "to_markdown(s)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert s.rounds == 10**6\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --- in the terminal ------------------------------------------------------------------------------------------------------------


def shown(s: Statement) -> str:
    out = io.StringIO()
    render(s, Console(file=out, width=80, color_system=None, legacy_windows=False))
    return out.getvalue()


def test_what_was_not_audited_names_the_command() -> None:
    s = stated(Claims())
    line = "audited -: no attack is on record; fedveil audit RUN adds one"
    assert line in " ".join(shown(s).split())
    assert {row[3].note for row in numbers_table(s).rows} == {"fedveil audit RUN"}
    found = [Audit(0.5, s.delta, replace(s.scope, view=v.view), "two worlds", 0.95, 1000, True) for v in s.views]
    assert line not in " ".join(shown(audited := s.with_audits(found)).split())
    assert {row[3].note for row in numbers_table(audited).rows} == {""}


def test_the_terminal_shows_everything_within_80_columns() -> None:
    s = stated(Claims(), seeded_noise=True)
    text = shown(s)
    assert max(len(line) for line in text.splitlines()) <= 80
    flat = " ".join(text.split())
    for part in (
        "Epsilon at delta = 1e-5, client level, zero-out",
        "claimed",
        "proven",
        "audited",
        "inf in the server view: the server receives uploads without noise of their own",
        "warning: simulation only: noise is reproducible, no privacy",
        "Can it learn?",
        "Assumptions",
        "Not protected",
        "In plain words",
    ):
        assert part in flat, part
    assert in_words(s) in flat


def test_brackets_in_reasons_are_shown_as_they_are() -> None:
    class Odd(DPFedAvg):
        def assumptions(self, s: Setting) -> tuple[str, ...]:
            return ("[red]layers[/red] [0, 1]",)

    assert "[red]layers[/red] [0, 1]" in shown(stated(Odd()))


@pytest.mark.parametrize("kind", ["dirichlet", "shards", "label-count", "iid"])
def test_at_record_level_a_division_by_labels_is_an_assumption(kind: str) -> None:
    """One label changes, and records of the others lie with other clients: none but the statement can say that it does not."""
    more = {"dirichlet": {"alpha": 0.5}, "shards": {"per_client": 2}, "label-count": {"labels_per_client": 2}}.get(kind, {})

    def assumed(unit: str) -> list[str]:
        training = {"local": "dp-sgd", "example_clip": 1.0} if unit == "record" else {}
        sections: dict[str, dict[str, Any]] = {
            "data": {"name": "digits", "partition": {"kind": kind, "clients": 10, **more}},
            "method": {"name": "fedavg", "weighting": "uniform"} if unit == "record" else {"name": "dp-fedavg"},
            "training": {"rounds": 2, **training},
            "privacy": {"unit": unit, "noise_multiplier": 2.0, "delta": 1e-5},
        }
        return [
            a.why for a in certify_config(parse(sections)).assumptions if a.what.startswith("which client holds which record")
        ]

    assert assumed("client") == []
    found = assumed("record")
    assert len(found) == (kind != "iid")
    assert all(f"data.partition.kind = '{kind}'" in why for why in found)
    labels = np.random.default_rng(0).integers(0, 10, 2000)

    def owners(of: NDArray[np.int64]) -> NDArray[np.int64]:
        made, found = partition(kind, of, clients=10, seed=0, **more), np.full(2000, -1)
        found[made.clients.order] = np.repeat(np.arange(10), made.sizes)
        return found

    others = [np.where(np.arange(2000) == i, (labels + 1) % 10, labels) for i in range(20)]
    moved = [np.flatnonzero(owners(labels) != owners(other)) for other in others]
    assert any((records != i).any() for i, records in enumerate(moved)) == bool(found), "it is there where it is needed"


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_at_record_level_that_a_record_left_out_moves_no_other_is_an_assumption(adjacency: str) -> None:
    """Zero-out zeroes a record's gradients; left out before the split, it moves others of its client into the test set."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 10}, "client_test_fraction": 0.2},
        "method": {"name": "fedavg", "weighting": "uniform"},
        "training": {"rounds": 2, "local": "dp-sgd", "example_clip": 1.0},
        "privacy": {"unit": "record", "adjacency": adjacency, "noise_multiplier": 2.0, "delta": 1e-5},
    }
    found = [
        a for a in certify_config(parse(sections)).assumptions if a.what.startswith("which records train, test or are public")
    ]
    assert len(found) == (adjacency == "zero_out")

    def trained_on(records: NDArray[np.int64]) -> set[int]:
        one = Partition(ClientIndices(records, np.array([0, len(records)])), "iid", 0)
        return set(client_test_split(one, 0.2, seed=1)[0].indices(0).tolist())

    whole, without = trained_on(np.arange(600)), trained_on(np.arange(1, 600))
    assert len(whole ^ without) > 100


def test_at_record_level_a_split_of_each_users_records_by_label_is_an_assumption() -> None:
    sections: dict[str, dict[str, Any]] = {
        "data": {"name": "uci-har", "partition": {"kind": "users"}},
        "method": {"name": "fedavg", "weighting": "uniform"},
        "training": {"rounds": 2, "local": "dp-sgd", "example_clip": 1.0},
        "privacy": {"unit": "record", "noise_multiplier": 2.0, "delta": 1e-5},
    }
    assert any("data.user_test_fraction goes" in a.why for a in certify_config(parse(sections)).assumptions)
    about, half = info("uci-har"), 20
    x, labels = np.zeros((2 * half, *about.input_shape), np.float32), np.arange(2 * half) % 2
    users = np.zeros(half, np.int64)

    def trained_on(y: NDArray[np.int64]) -> set[int]:
        numbered = x.copy()
        numbered.reshape(2 * half, -1)[:, 0] = np.arange(2 * half)
        data = Dataset(about, numbered[:half], y[:half], numbered[half:], y[half:], users, users)
        return set(split_within_users(data, 0.2).x_train.reshape(-1, math.prod(about.input_shape))[:, 0].astype(int))

    other = labels.copy()
    other[0] = 1 - other[0]
    assert trained_on(labels) ^ trained_on(other) > set(), "the label of record 0 moved another record"
    assert 0 in trained_on(labels) & trained_on(other)


TWO_VARIANTS = [name for name, kind in METHODS.items() if "variant" in kind.model_fields]


@pytest.mark.parametrize("name", TWO_VARIANTS)
def test_a_method_with_two_variants_says_in_one_clause_how_the_proven_one_differs(name: str) -> None:
    clause = METHODS[name].proven_difference
    assert 40 <= len(clause) <= 200
    assert not clause.endswith(".")
    assert clause[0].islower()
    assert METHODS["dp-fedavg"].proven_difference == "", "it is the paper's"


def test_a_proven_statement_says_how_the_method_differs_from_its_paper(tmp_path: Path) -> None:
    line = f"unlike the paper: {METHODS['ladp-fl'].proven_difference}"
    fv.train(config({"name": "ladp-fl"}, training={"rounds": 1}), tmp_path / "run", data=small_digits())
    run = fv.open_run(tmp_path / "run")
    assert line in " ".join(str(run.privacy).split())
    assert line in run.privacy._repr_html_()
    assert line in (run.path / "statement.md").read_text(encoding="utf-8")
    assert line.partition(": ")[2] not in (run.path / "statement.json").read_text(encoding="utf-8")
    assert line.partition(": ")[2] in run.report(tmp_path / "page.html").read_text(encoding="utf-8")
    published = fv.certify(config({"name": "ladp-fl", "variant": "published"}, "server"), data=small_digits())
    assert "unlike the paper" not in str(published)
    assert "unlike the paper" not in str(fv.certify(config({"name": "dp-fedavg"}), data=small_digits()))


def test_a_statement_of_a_method_that_is_not_here_is_read_all_the_same() -> None:
    assert "unlike the paper" not in to_markdown(replace(stated(DPFedAvg()), method="of-another-package"))
