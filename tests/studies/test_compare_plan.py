"""What a comparison runs: guarantees that are equal, methods with their options, reasons for what cannot be run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedveil.cli.study_terminal import split_list
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.experiment.sections import given_keys
from fedveil.methods.fedavg import DPFedAvg
from fedveil.studies.compare.comparison_plan import ComparisonSpec, Planned, at_claim, configured, partition_of
from fedveil.studies.compare.comparison_plan import plan as plan_of
from grid_cells import small


def base(view: str = "aggregate", **training: Any) -> Config:
    sections = small().model_dump(mode="json")
    sections["training"] |= {"batch_clip": 1.0, "local_steps": 2, **training}
    sections["privacy"]["view"] = view
    return configure(**sections)


def plan(*what: Any, **more: Any) -> list[Planned]:
    return plan_of(ComparisonSpec(*what, **more))


def row(rows: list[Planned], method: str, epsilon: float) -> Planned:
    return next(r for r in rows if (r.method, r.epsilon) == (method, epsilon))


def test_every_method_promises_the_same() -> None:
    methods = ["dp-fedavg", "aldp-fl", "ladp-fl", "noisy-fedavg", "fedanc"]
    rows = plan(base(), methods, [2, 8], [1, 2])
    assert [(r.method, r.epsilon) for r in rows] == [(m, e) for m in methods for e in (2, 8)]
    for r in rows:
        assert r.statement is not None
        assert r.epsilon * 0.999 < r.statement.proven.epsilon <= r.epsilon * (1 + 1e-6)
        assert [c.config.run.seed for c in r.cells] == [1, 2]
        assert [c.labels["seed"] for c in r.cells] == [1, 2]
        for c in r.cells:
            assert certify_config(c.config).proven == r.statement.proven
    assert row(rows, "aldp-fl", 2).cells[1].name == "aldp-fl/eps-2/seed-2"


def test_a_method_without_noise_is_the_reference_and_runs_once() -> None:
    rows = plan(base(), ["fedavg", "dp-fedavg"], [2, 8], [1])
    assert [(r.method, r.epsilon) for r in rows] == [("fedavg", math.inf), ("dp-fedavg", 2), ("dp-fedavg", 8)]
    assert rows[0].cells[0].name == "fedavg/no-noise/seed-1"
    assert (rows[0].cells[0].config.privacy.epsilon, rows[0].cells[0].config.privacy.noise_multiplier) == (None, None)


def test_only_what_has_no_noise_at_all_becomes_the_reference() -> None:
    vacuous = base().model_copy(update={"privacy": base().privacy.model_copy(update={"delta": 0.1})})
    rows = plan(vacuous, ["fedavg", "dp-fedavg", "aldp-fl"], [2], [1])
    assert [(r.method, r.epsilon, bool(r.cells)) for r in rows] == [
        *(("fedavg", math.inf, True), ("dp-fedavg", 2, False), ("aldp-fl", 2, False))
    ]
    assert all("delta" in r.reason for r in rows[1:])


def test_infinity_is_a_run_without_noise() -> None:
    (found,) = plan(base(), ["dp-fedavg"], [math.inf], [1])
    assert found.cells[0].config.privacy.noise_multiplier == 0.0


def test_what_cannot_be_run_has_its_reason() -> None:
    without = base(batch_clip=None)
    rows = plan(without, ["dp-fedavg", "noisy-fedavg", "aldp-fl:variant=published"], [2], [1])
    assert rows[0].cells
    assert (rows[1].cells, "training.batch_clip" in rows[1].reason) == ((), True)
    assert rows[2].cells == ()
    assert "proven is no bound" in rows[2].reason
    assert "not comparable at a proven epsilon of 2" in rows[2].reason


@pytest.mark.parametrize("method", ["aldp-fl", "ladp-fl", "fedglp-adp", "noisy-fedavg"])
def test_claims_are_made_equal(method: str) -> None:
    configuration = configured(base("server"), method, "claimed")
    assert given_keys(configuration.method)["variant"] == "published"
    claim = certify_config(at_claim(configuration, 3.0)).claimed
    assert claim is not None
    assert claim.epsilon == pytest.approx(3.0, rel=1e-3)


def test_claims_need_not_follow_epsilon() -> None:
    rows = plan(base("server"), ["fedanc", "dp-fedavg"], [3], [1], by="claimed")
    assert "no privacy.epsilon was found at which the paper claims 3" in rows[0].reason
    assert rows[1].statement is not None
    assert rows[1].statement.proven.epsilon == pytest.approx(3.0, rel=1e-3)  # no claim beside its proof
    assert rows[1].cells[0].name == "dp-fedavg/claimed-eps-3/seed-1"


def test_options_of_a_method() -> None:
    configuration = base().model_copy(update={"method": DPFedAvg(clip=0.25)})
    assert configured(configuration, "dp-fedavg").method == DPFedAvg(
        clip=0.25
    )  # the configuration's own method keeps its options
    assert "clip" not in given_keys(configured(configuration, "aldp-fl").method)
    found = configured(configuration, "aldp-fl:clip=0.5:clip_range=[0.5, 2.0]:training.optimizer.lr=0.02")
    assert given_keys(found.method) == {"name": "aldp-fl", "variant": "proven", "clip": 0.5, "clip_range": [0.5, 2.0]}
    assert found.training.optimizer.lr == 0.02
    assert found.data == configuration.data


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["dp-fedavgg"], "unknown method .did you mean 'dp-fedavg'"),
        (["dp-fedavg:clipp=1"], "clipp.*unknown key"),
        (["dp-fedavg:clip"], "name:key=value"),
        (["dp-fedavg:run.seed=3"], "name:key=value"),
        (["dp-fedavg:privacy.epsilon=3"], "name:key=value"),
        (["dp-fedavg:training.round=3"], "unknown key"),
        (["dp-fedavg", "dp-fedavg"], "--methods names dp-fedavg twice"),
    ],
)
def test_refused_methods(methods: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(base(), methods, [2], [1])


def test_a_wrong_method_is_refused_before_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.studies.compare.comparison_plan.Check.problem", lambda *_: pytest.fail("data are read"))
    with pytest.raises(ConfigError, match="unknown method"):
        plan(base(), ["dp-fedavg", "dp-fedavgg"], [2], [1])


def test_a_method_cannot_change_what_a_proven_epsilon_speaks_of() -> None:
    for option in ("view=server", "unit=record", "adjacency=replace_one", "delta=0.0001"):
        with pytest.raises(ConfigError, match=rf"privacy\.{option.split('=')[0]} is part of the guarantee"):
            plan(base(), ["dp-fedavg", f"dp-fedavg:privacy.{option}"], [2], [1])
    assert plan(base(), ["dp-fedavg:privacy.view=server"], [2], [1], by="claimed")[0].cells


def test_data_that_cannot_be_dealt_out_are_told_before_training() -> None:
    (kept, impossible) = plan(base(), ["dp-fedavg"], [8], [1, 2], ["iid", "dirichlet:alpha=0.01:min_size=20"])
    assert kept.cells
    assert impossible.cells == ()
    assert impossible.reason.startswith("seeds 1, 2: ")


def test_a_number_that_nobody_measures_is_told_before_training() -> None:
    (no_tests,) = plan(base(), ["dp-fedavg"], [8], [1], metric="mean_personal_accuracy")
    assert (no_tests.cells, "set data.client_test_fraction" in no_tests.reason) == ((), True)
    configuration = base()
    configuration = configuration.model_copy(update={"data": configuration.data.model_copy(update={"client_test_fraction": 0.2})})
    methods = ["dp-fedavg", "dp-fedavg:training.measure_trained=true"]
    rows = plan(configuration, methods, [8], [1], metric="mean_personal_accuracy")
    assert [bool(r.cells) for r in rows] == [False, True]
    assert "dp-fedavg has no models of the clients' own" in rows[0].reason
    on_test_set = plan(configuration, methods[1:], [8], [1], metric="mean_personal_test_accuracy")
    assert (on_test_set[0].cells, "set it" in on_test_set[0].reason) == ((), True)
    asked = [f"{method}:training.personal_on_test_set=true" for method in methods[1:]]
    assert plan(base(), asked, [8], [1], metric="mean_personal_test_accuracy")[0].cells
    apart = [f"{method}:run.engine=flower" for method in asked]
    (kept_apart,) = plan(base(), apart, [8], [1], metric="mean_personal_test_accuracy")
    assert (kept_apart.cells, "keep their own models to themselves" in kept_apart.reason) == ((), True)


def test_refused_epsilons_and_seeds() -> None:
    for epsilons, seeds, message in (
        ([2, 2.0], [1], "--epsilon names 2 twice"),
        ([0], [1], "above 0"),
        ([math.nan], [1], "above 0"),
        ([2], [1, 1], "--seeds names 1 twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(base(), ["dp-fedavg"], epsilons, seeds)
    with pytest.raises(ConfigError, match="nothing is claimed"):
        plan(base(), ["dp-fedavg"], [math.inf], [1], by="claimed")


def test_partitions() -> None:
    configuration = base()
    assert partition_of("iid", configuration) == {"kind": "iid", "clients": 60}
    assert partition_of("dirichlet:0.1", configuration) == {"kind": "dirichlet", "clients": 60, "alpha": 0.1}
    assert partition_of("dirichlet:alpha=0.1:clients=30", configuration) == {"kind": "dirichlet", "clients": 30, "alpha": 0.1}
    assert partition_of("shards:3", configuration) == {"kind": "shards", "clients": 60, "per_client": 3}
    for text, message in (
        ("dirichlett:1", "dirichlet"),
        ("dirichlet:0", "alpha"),
        ("dirichlet", "alpha"),
        ("iid:alfa=1", "alfa"),
    ):
        with pytest.raises(ConfigError, match=message):
            partition_of(text, configuration)
    rows = plan(configuration, ["dp-fedavg"], [2], [1], ["iid", "dirichlet:0.5"])
    assert [r.partition for r in rows] == ["iid", "dirichlet:0.5"]
    assert rows[1].cells[0].name == "dp-fedavg/dirichlet-0.5/eps-2/seed-1"
    assert rows[1].cells[0].config.data.partition["alpha"] == 0.5


def test_lists_split_at_commas_outside_brackets() -> None:
    assert split_list("a, b:x=[1, 2]:y={z = 3, w = 4},c,") == ["a", "b:x=[1, 2]:y={z = 3, w = 4}", "c"]
    assert split_list("") == []
