"""Audits of real methods: what is proven is never exceeded, and the published faults are found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation_runs import DEFENCES
from fedveil.accounting.types import Audit, View
from fedveil.attacks.audit_run import audit, audit_config, audit_run
from fedveil.audit.adapter import Case, release_subject, run_score, sampled_run, worst_shift
from fedveil.audit.low_bits import audit_released_bits
from fedveil.audit.single_upload import single_upload
from fedveil.audit.training_audit import Trainer, pairs
from fedveil.audit.two_world import Repeats, many_runs, many_sampled_runs
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, parse
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.mechanism.cost import plan_mu
from fedveil.mechanism.plan import Plan
from fedveil.mechanism.sampler import rounded_normal
from fedveil.methods.method_registry import METHODS
from fedveil.papers.convergent_dp.audit import LinearRun, audit_linear_loss
from fedveil.release.noise import Randomness
from fedveil.statement.statement_layout import read_statement, to_dict
from method_kit import layout as layout_of

RECORD = {"unit": "record", "adjacency": "replace_one", "view": "server"}
DELETED = {**RECORD, "adjacency": "zero_out"}
"""LaDP-FL's neighbours: one instance is deleted or replicated."""


def small(method: dict[str, Any], rounds: int = 4, *, clients: int = 8, sampling: str = "fixed", **privacy: Any) -> Config:
    noise = {} if method["name"] in {"fedavg", "scaffold", *DEFENCES} else {"epsilon": 2.0}
    by_record = method["name"] == BY_RECORD
    return parse(
        {
            "data": {"partition": {"kind": "iid", "clients": clients}},
            "model": {"name": "linear"},
            "method": method,
            "training": {
                "rounds": rounds,
                "clients_per_round": 4,
                "batch_size": 16,
                "batch_clip": 1.0,
                "local_steps": 2,
                "sampling": sampling,
                **({"local": "dp-sgd"} if by_record else {}),
            },
            "privacy": {"delta": 1e-4 if by_record else 1e-3, **noise, **({"unit": "record"} if by_record else {}), **privacy},
        }
    )


ONLY_SUMS = "banded-mf"
"""Adds correlated noise, to sums only."""
BY_RECORD = "adap-dp-fl"
"""Adapts DP-SGD inside the clients."""


VIEWS = [
    (name, view)
    for name in METHODS
    for view in ("server", "aggregate")
    if name not in DEFENCES and (name, view) != (ONLY_SUMS, "server")
]
IN_BOTH = ("dp-fedavg",)
SUMS = (ONLY_SUMS, "noisy-fedavg", "noisy-fedprox", "dp-scaffold", "adaptive-clipping", "time-varying-dp", "nbafl")
USUAL = [(name, view) for name, view in VIEWS if name in IN_BOTH or (view == "aggregate") == (name in SUMS)]
"""DP-FedAvg in both views, the others in one; the rest is slow."""


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "view"),
    [one if one in USUAL else pytest.param(*one, marks=pytest.mark.slow) for one in VIEWS],
)
def test_no_proven_number_is_exceeded(name: str, view: str) -> None:
    method: dict[str, Any] = {"name": name}
    if name == ONLY_SUMS:
        method["separation"] = 2
    if name == "fedanc":
        method["pretraining_steps"] = 20
    statement = audit_config(small(method, view=view), n=40)
    numbers = statement.view(View(view))
    assert numbers.audits
    assert all(found.epsilon <= numbers.proven.epsilon for found in numbers.audits)
    assert not [c for c in statement.contradictions() if c.number == "proven"]
    if name == "fedavg":
        assert math.isinf(max(found.epsilon for found in numbers.audits))


@pytest.mark.parametrize(
    ("name", "adjacency"),
    [
        *[("fedavg", "zero_out"), ("dp-fedavg", "replace_one")],
        *(pytest.param(name, "zero_out", marks=pytest.mark.slow) for name in ("dp-fedavg", "ladp-fl", "aldp-fl")),
        *(pytest.param(name, "replace_one", marks=pytest.mark.slow) for name in ("fedavg", "ladp-fl", "aldp-fl")),
    ],
)
def test_no_proven_number_is_exceeded_where_few_join_in_secret(name: str, adjacency: str) -> None:
    """4 of 80 clients and 2 rounds: what one sum tells of a client that is surely in it is far above what is proven."""
    config = small({"name": name}, 2, clients=80, sampling="poisson", view="aggregate", adjacency=adjacency)
    statement = audit_config(config, n=300)
    assert statement.own.audits
    assert not [c for c in statement.contradictions() if c.number == "proven"]
    if name == "fedavg":
        assert math.isinf(max(found.epsilon for found in statement.own.audits))


@pytest.mark.parametrize("name", sorted(DEFENCES))
def test_a_method_that_promises_nothing_is_not_audited(name: str) -> None:
    with pytest.raises(ConfigError, match="attack it"):
        audit_config(small({"name": name}, view="server"), n=40)


def test_a_canary_that_joins_by_chance_leaks_only_below_that_chance() -> None:
    method, setting = calibrated_setting(small({"name": "fedavg"}, clients=80, sampling="poisson", view="aggregate"))
    subject = release_subject(Case.of(method, setting, dimension=20), np.random.default_rng(0))
    below, above = (single_upload(subject, np.random.default_rng(0), n=50, pilot=20, delta=d).headline for d in (0.01, 0.06))
    assert math.isinf(below.epsilon)
    assert math.isfinite(above.epsilon)


ROUNDS = pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.slow)])


@ROUNDS
def test_half_the_noise_under_secret_sampling_is_refuted(rounds: int) -> None:
    method, setting = calibrated_setting(small({"name": "dp-fedavg"}, rounds, sampling="poisson", view="aggregate"))
    found = []
    for factor in (0.5, 1.0):
        case = Case.of(method, replace(setting, noise_multiplier=setting.z * factor), dimension=20)
        event, scores = sampled_run(Case.of(method, setting), rounds, np.random.default_rng(0)), run_score(case, rounds)
        assert event is not None
        rng = np.random.default_rng(0)
        found.append(many_sampled_runs(scores, event, case.scope, rng, Repeats(300, 100, 1e-3)).epsilon)
    assert found[0] > 2.0 >= found[1] > 0.2


@ROUNDS
def test_half_the_noise_at_the_door_is_refuted(rounds: int) -> None:
    method, setting = calibrated_setting(small({"name": "dp-fedavg"}, rounds, view="server"))
    assert setting.noise_multiplier is not None
    faulty = Case.of(method, replace(setting, noise_multiplier=setting.noise_multiplier / 2), dimension=100)
    honest = Case.of(method, setting, dimension=100)
    found = [
        many_runs(run_score(case, rounds), case.scope, np.random.default_rng(0), Repeats(400, 100, 1e-3), gaussian=True).epsilon
        for case in (faulty, honest)
    ]
    assert found[0] > 2.0 >= found[1] > 0.5


@pytest.mark.parametrize(
    "plan",
    [
        Plan(clip=2.0, noise_std=torch.tensor([1.0, 3.0, 2.0])),
        Plan(layer_clip=torch.tensor([1.0, 2.0, 0.5]), noise_std=torch.tensor([1.0, 3.0, 2.0])),
        Plan(clip=1.2, layer_clip=torch.tensor([1.0, 2.0, 0.5]), noise_std=torch.tensor([1.0, 3.0, 2.0])),
        Plan(clip=2.0, noise_std=1.5, support=torch.tensor([False] * 4 + [True] * 5)),
    ],
)
def test_the_worst_shift_costs_what_the_plan_is_charged(plan: Plan) -> None:
    layout = layout_of({"a": (4,), "b": (3,), "c": (2,)})
    std = plan.noise_std if isinstance(plan.noise_std, torch.Tensor) else torch.full((3,), plan.noise_std)
    shift = worst_shift(plan, layout)
    assert float((shift / layout.expand(std)).norm()) == pytest.approx(plan_mu(plan, layout, 1), rel=1e-5)


@pytest.mark.slow
def test_ladp_with_an_unselected_layer_leaks_without_limit() -> None:
    found = audit(small({"name": "ladp-fl", "variant": "published", "threshold": 0.3}, **DELETED), n=20)
    assert any(math.isinf(one.epsilon) and "structural" in one.test for one in found)


@pytest.mark.slow
def test_ladp_with_every_layer_noised_is_above_its_claim() -> None:
    """The noise scale follows raw movement: one example among flat losses changes it in every layer."""
    statement = audit_config(small({"name": "ladp-fl", "variant": "published"}, rounds=5, **DELETED), n=60)
    assert [c.label for c in statement.contradictions() if c.number == "claimed"]
    assert all("structural" not in audit.test for audit in statement.own.audits)


@pytest.mark.slow
def test_noise_scales_of_fedglp_published_tell_a_growing_layer() -> None:
    found = audit(small({"name": "fedglp-adp", "variant": "published"}, rounds=5, view="server"), n=60)
    server = [one for one in found if one.scope.view is View.SERVER]
    assert max(one.epsilon for one in server) > 1.8
    assert not any(math.isinf(one.epsilon) for one in found)


def test_a_claim_about_sums_is_audited_on_sums_although_the_server_sees_uploads() -> None:
    statement = audit_config(small({"name": "fed-dpa", "variant": "published"}, view="server"), n=60)
    single, summed = (statement.view(view).audits for view in (View.SERVER, View.AGGREGATE))
    assert {one.confidence for one in (*single, *summed)} == {1 - 0.05 / 6}
    worst = [max(one.epsilon for one in audits) for audits in (single, summed)]
    assert worst[0] > worst[1] > 2.0
    assert [c.audit.scope.view for c in statement.contradictions() if c.number == "claimed"] == [View.AGGREGATE]
    without = audit_config(small({"name": "fed-dpa"}, view="server"), n=20)
    assert not without.view(View.AGGREGATE).audits


def test_shares_of_noise_add_up_in_an_audited_sum() -> None:
    method, setting = calibrated_setting(small({"name": "blur-lus", "variant": "published"}, view="server"))
    server = Case.of(method, setting, dimension=20)
    summed = replace(server, setting=replace(server.setting, scope=replace(setting.scope, view=View.AGGREGATE)))
    seen = [
        np.std([release_subject(c, np.random.default_rng(i)).mechanism(0, np.random.default_rng(i)).vector for i in range(60)])
        for c in (server, summed)
    ]
    assert seen[1] / seen[0] == pytest.approx(2.0, rel=0.15)  # four uploads


@pytest.mark.slow
def test_fedanc_published_leaks_without_limit() -> None:
    found = audit(small({"name": "fedanc", "variant": "published"}, rounds=1, **RECORD), n=20)
    assert any(math.isinf(one.epsilon) and "structural" in one.test for one in found)


@pytest.mark.slow
def test_aldp_published_is_above_its_claim() -> None:
    config = small({"name": "aldp-fl", "variant": "published"}, **RECORD)
    statement = audit_config(config, n=60)
    refuted = [c for c in statement.contradictions() if c.number == "claimed"]
    assert refuted
    assert refuted[0].label == "REFUTED"


def test_theorem_3a_is_refuted_after_fifty_rounds() -> None:
    run = LinearRun(rounds=50)
    mu, found = audit_linear_loss(run, np.random.default_rng(0), n=2000)
    assert run.claimed_mu < mu <= run.true_mu
    assert found.epsilon > 8


def test_layers_that_move_or_not_change_the_noise_and_quiet_runs_have_none() -> None:
    method, setting = calibrated_setting(small({"name": "ladp-fl", "variant": "published"}, rounds=2, **RECORD))
    case = Case.of(method, setting, dimension=60)
    neighbours = pairs(case, 2)[1]
    trainer = Trainer(case, neighbours, 2, case.scope)
    rng = np.random.default_rng(0)
    still, again = (trainer(0, rng, noiseless=True).vector for _ in range(2))
    assert np.array_equal(still, again)
    spread = [np.std([trainer(world, rng).vector for _ in range(60)]) for world in (0, 1)]
    assert spread[0] > 1.5 * spread[1]  # where nothing moved, P is small and the noise large


def test_one_release_of_a_method_is_structurally_clean() -> None:
    method, setting = calibrated_setting(small({"name": "dp-fedavg"}, view="aggregate"))
    case = Case.of(method, setting, dimension=60)
    rng = np.random.default_rng(1)
    assert not single_upload(release_subject(case, rng), rng, n=50, pilot=50).structure.leak


def test_a_run_gets_its_audit(tmp_path: Path) -> None:
    from fedveil.experiment.certify import certify_config
    from fedveil.experiment.run_directory import write_config

    config = small({"name": "dp-fedavg"}, view="server")
    write_config(tmp_path / "config.toml", config.resolved())
    before = json.dumps(to_dict(certify_config(config)))
    (tmp_path / "statement.json").write_text(before)
    made = audit_run(tmp_path, n=40)
    written = json.loads((tmp_path / "audits.json").read_text())
    assert len(written) == 3
    assert "that the two worlds' bits have one law" in json.dumps(written)
    assert "canary in 4 of 4 rounds" in json.dumps(written)
    assert (tmp_path / "statement.json").read_text() == before, "the run's digests bind the statement"
    assert read_statement(tmp_path) == made


def test_a_second_audit_of_a_run_replaces_the_first(tmp_path: Path) -> None:
    from fedveil.experiment.certify import certify_config
    from fedveil.experiment.run_directory import write_config

    config = small({"name": "dp-fedavg"}, view="server")
    write_config(tmp_path / "config.toml", config.resolved())
    lucky = Audit(9.0, 1e-3, certify_config(config).scope, "another test", 0.95, 40)
    guess = replace(lucky, test="canaries", rigorous=False)
    (tmp_path / "statement.json").write_text(json.dumps(to_dict(certify_config(config).with_audits([lucky, guess]))))
    first, second = (audit_run(tmp_path, n=n).view(View.SERVER).audits for n in (40, 60))
    assert [a.n for a in first] == [40, 80, 80, 80]
    assert [a.n for a in second] == [40, 120, 120, 120]
    assert second[0] == guess
    assert {a.scope for a in second} == {lucky.scope}


def test_the_tests_of_one_audit_share_its_error() -> None:
    found = audit(small({"name": "dp-fedavg"}, view="server"), n=40, confidence=0.9)
    assert [one.confidence for one in found] == [pytest.approx(1 - 0.1 / 3)] * 3
    (alone,) = audit(small({"name": "fedavg"}, sampling="poisson"), n=40, confidence=0.9)
    assert math.isinf(alone.epsilon)


def test_the_old_arithmetic_is_found_by_the_audit_of_released_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def evens(self: Any, std: Any, n: int, *name: object, threads: int | None = None) -> np.ndarray:
        return 2 * (rounded_normal(std, n, self.key(*name)) // 2)

    method, setting = calibrated_setting(small({"name": "dp-fedavg"}, view="server"))
    case = Case.of(method, setting)
    sound = audit_released_bits(case, np.random.default_rng(1), n=40, delta=1e-3, alpha=0.05)
    assert sound is not None
    assert sound.epsilon == 0
    monkeypatch.setattr(Randomness, "integers", evens)
    broken = audit_released_bits(case, np.random.default_rng(1), n=40, delta=1e-3, alpha=0.05)
    assert broken is not None
    assert broken.epsilon > 1


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="n >= 10"):
        audit(small({"name": "dp-fedavg"}), n=5)
    with pytest.raises(ConfigError, match="not a run directory"):
        audit_run(tmp_path)
