"""FedGLP-ADP: each equation by hand, what is charged, what the plans depend on, and that it learns."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from torch.nn import functional as F

import method_kit as h
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.experiment.config import configure
from fedveil.experiment.config_files import load_config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.run import run
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.mechanism.cost import plan_mu
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.base import CoverageMean
from fedveil.methods.setting import Setting
from fedveil.papers.fedglp_adp import claim as fedglp
from fedveil.papers.fedglp_adp.claim import ORDERS
from fedveil.papers.fedglp_adp.method import (
    FedGLPADP,
    TwoLosses,
    clip_weights,
    grown,
    network_layers,
    next_log_odds,
    personal_share,
    share_after,
    sigma,
    start_log_odds,
)
from fedveil.training.local import Local
from fedveil.training.params import FlatModel
from method_kit import planner

LAYERS = {"a": (8,), "b": (2,)}
LAYOUT = h.layout(LAYERS)
ADAM = ("training.optimizer.name=adam", "training.optimizer.lr=0.01")


def setting(view: View = View.SERVER, z: float | None = 1.5, **more: Any) -> Setting:
    return h.setting(view, LAYERS, training={"batch_size": 4}, cohort=10, records=4, noise_multiplier=z, **more)


# --- the paper's numbers -----------------------------------------------------------------------------------------------


def test_the_papers_accountant_gives_the_beta_of_its_table_3_and_its_theorem_does_not() -> None:
    printed = {2: 0.45, 4: 0.34, 6: 0.30, 16: 0.25}
    for accountant, fits in (("opacus", True), ("theorem1", False)):
        method = FedGLPADP(variant="published", accountant=accountant)  # type: ignore[arg-type]
        found = {e: personal_share(method, replace(setting(z=None), epsilon=float(e), delta=0.1)) for e in printed}
        assert (all(abs(found[e] - printed[e]) <= 0.005 for e in printed)) is fits


def test_the_papers_accountant_against_a_second_implementation() -> None:
    for noise, rounds, delta in ((2.0, 20, 0.1), (5.0, 40, 1e-3), (0.7, 3, 1e-5)):
        other = dp_accounting.rdp.RdpAccountant(list(ORDERS)).compose(dp_accounting.GaussianDpEvent(noise), rounds)
        assert fedglp.accountant_epsilon(noise, rounds, delta) == pytest.approx(other.get_epsilon(delta), rel=1e-6)
        epsilon = fedglp.accountant_epsilon(noise, rounds, delta)
        assert fedglp.accountant_noise_multiplier(epsilon, rounds, delta) == pytest.approx(noise, rel=1e-6)


def test_uplink_bits_sum_to_the_papers_total() -> None:
    m, beta, rounds = 1000, 0.3, 200
    total = sum(fedglp.uplink_bits(m, beta, t, rounds) for t in range(1, rounds + 1))
    # the paper replaces the sum of t by T^2 / 2, which leaves out beta M 16
    assert total == pytest.approx(m * rounds * (33 - 16 * beta) - 16 * m * beta)
    assert fedglp.uplink_bits(m, beta, rounds, rounds) == pytest.approx(32 * m * 0.7 + m)


def test_beta_follows_equation_11() -> None:
    s = setting(View.AGGREGATE, z=3.0)
    assert personal_share(FedGLPADP(beta0=0.3, slope=0.2, sigma0=1.0), s) == pytest.approx(0.3 * math.exp(0.2 * 2.0))
    assert sigma(FedGLPADP(), s) == 3.0
    assert sigma(FedGLPADP(), setting(View.SERVER, z=3.0)) == pytest.approx(3.0 * math.sqrt(10))
    assert personal_share(FedGLPADP(beta0=0.3, slope=0), s) == 0.3
    assert personal_share(FedGLPADP(beta0=0.3, slope=0.2, sigma0=0.0), replace(s, noise_multiplier=50.0)) == 0.9


# --- each equation by hand ---------------------------------------------------------------------------------------------


def test_clip_weights_by_hand() -> None:
    odds = start_log_odds(LAYOUT, 20.0)
    assert odds.tolist() == pytest.approx([math.log(4), -math.log(4)])
    assert clip_weights(odds).tolist() == pytest.approx([0.8, 0.2])
    norms, before = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0])
    assert next_log_odds(odds, norms, None, 0.4, 20.0) is odds
    new = next_log_odds(odds, norms, before, 0.4, 20.0)
    up, down = (1 / (1 + math.exp(-v)) for v in (math.log(4) + 0.4, -math.log(4) - 0.4))
    assert clip_weights(new).tolist() == pytest.approx([up / (up + down), down / (up + down)])
    extreme = next_log_odds(torch.tensor([-19.9, -19.9]), norms * 0, before * 0, 0.4, 20.0)
    assert clip_weights(extreme).tolist() == pytest.approx([0.5, 0.5])


def test_masks_grow_by_p_to_beta_and_not_beyond() -> None:
    method, s = FedGLPADP(growth=0.25), setting()
    mask, size = torch.zeros(10).bool(), torch.tensor([1.0, 8, 2, 7, 3, 6, 4, 5, 1, 2])
    for rounds, a, b in ((1, {1, 3}, set()), (2, {1, 3, 5}, set()), (3, {1, 3, 5}, set()), (9, {1, 3, 5}, set())):
        mask = grown(mask, size, LAYOUT, share_after(method, s, 0.45, rounds))
        assert set(mask.nonzero().flatten().tolist()) == a | b
    assert set(grown(mask, size, LAYOUT, 0.5).nonzero().flatten().tolist()) == {1, 3, 5, 7, 9}
    assert torch.equal(grown(mask, size, LAYOUT, 0.1), mask), "what is personal stays so"


def test_a_coordinate_is_averaged_over_those_who_share_it() -> None:
    def upload(vector: list[float], support: list[bool] | None, weight: float = 1.0) -> Upload:
        mask = None if support is None else torch.tensor(support)
        return Upload(0, 0, torch.tensor(vector), torch.zeros(1), Plan(), mask, weight)

    uploads = [upload([1.0, 2.0, 0.0], [True, True, False]), upload([3.0, 0.0, 0.0], [True, False, False])]
    assert h.stepped(CoverageMean(), uploads, torch.zeros(3)).tolist() == [2.0, 2.0, 0.0]
    assert h.stepped(CoverageMean(), [upload([1.0, 2.0, 3.0], None)], torch.zeros(3)).tolist() == [1.0, 2.0, 3.0]
    weighted = [upload([4.0], [True], 1.0), upload([1.0], [True], 0.5)]
    assert h.stepped(CoverageMean(), weighted, torch.zeros(1)).item() == pytest.approx(3.0)


def linear() -> FlatModel:
    module = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape) + 0.1 * i)
    return h.local_of(module).model


def local_for(model: FlatModel, support: torch.Tensor | None = None, **state: Any) -> Local:
    return h.local_of(model, training={"batch_size": 4, "optimizer": {"lr": 0.1}}, state=state, support=support, steps=1)


X = torch.tensor([[1.0, 0.5, -1.0, 2.0], [0.2, -0.3, 0.8, 1.0], [0.0, 1.0, 1.0, -1.0], [1.5, 0.1, 0.4, -0.6]])
Y = torch.tensor([0, 1, 1, 0])


def gradient_at(w: torch.Tensor) -> torch.Tensor:
    w = w.clone().requires_grad_()
    F.cross_entropy(X @ w[:8].view(2, 4).T + w[8:], Y).backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    return w.grad


def test_personal_step_first_then_the_shared_step_with_the_new_personal_weights() -> None:
    method = FedGLPADP(lambda1=0.1, lambda2=0.05, clip=0.5, personal_model="combined")
    personal = torch.arange(10) % 3 == 0
    model = linear()
    local = local_for(model, ~personal, personal=model.vector + 0.3)
    objective = TwoLosses(method, setting(), 0.3)
    first = (model.vector + 0.3).where(personal, model.vector)
    objective.begin(local)
    assert model.vector.tolist() == pytest.approx(first.tolist())
    w = first.clone()
    for k in range(3):
        local.step = k
        objective.step(local, X, Y)
        v = (w - first) * personal
        w = w - 0.1 * (gradient_at(w) + 0.05 * v / max(float(v.norm()), 1e-30)) * personal
        u = (w - first) * ~personal
        pull = 0.025 * (1 if u.norm() > 0.5 else -1) * u / max(float(u.norm()), 1e-30)
        w = w - 0.1 * (gradient_at(w) + pull) * ~personal
        assert model.vector.tolist() == pytest.approx(w.tolist(), abs=1e-6)
    together = first - 0.1 * gradient_at(first)
    one_order = (first - 0.1 * gradient_at(first) * personal).where(personal, first)
    assert (gradient_at(one_order) - gradient_at(first)).abs().max() > 1e-4, "the two orders must differ for this to test them"
    assert together.shape == w.shape
    update = objective.finish(local)
    assert update.tolist() == pytest.approx(((w - first) * ~personal).tolist(), abs=1e-6)
    assert objective.personal(torch.full((10,), 9.0), local.state).tolist() == pytest.approx(
        w.where(personal, torch.tensor(9.0)).tolist(), abs=1e-6
    )
    trained = replace(objective, method=method.model_copy(update={"personal_model": "trained"}))
    assert trained.personal(torch.full((10,), 9.0), local.state).tolist() == pytest.approx(w.tolist(), abs=1e-6)


def test_adam_moves_each_part_only_in_its_own_step() -> None:
    personal = torch.arange(10) < 5
    local = local_for(linear(), ~personal, personal=linear().vector)
    local.spec = h.local_of(linear(), training={"optimizer": {"name": "adam", "lr": 0.01}}).spec
    objective = TwoLosses(FedGLPADP(lambda1=0, lambda2=0), setting(), 0.3)
    objective.begin(local)
    before = local.model.vector.clone()
    objective.step(local, X, Y)
    moved = (local.model.vector - before).abs()
    # Adam's first step has length lr wherever the gradient is not 0; a second step of the same part would double it
    assert moved.tolist() == pytest.approx([0.01] * 10, rel=1e-3)


def test_published_noise_has_the_papers_variance_on_shared_coordinates_only() -> None:
    method, s = FedGLPADP(variant="published", clip=0.01), replace(setting(z=None), epsilon=6.0)
    objective = method.client(s)
    assert isinstance(objective, TwoLosses)
    mask = torch.arange(10) % 4 == 0
    model = linear()
    updates = []
    for normal in (torch.zeros, torch.ones):
        local = local_for(linear(), None, personal=model.vector.clone(), mask=mask.clone())
        local.normal = normal
        objective.begin(local)
        objective.step(local, X, Y)
        updates.append(objective.finish(local))
    noise = updates[1] - updates[0]
    noise_of = fedglp.accountant_noise_multiplier(6.0, 20, 1e-3)
    stds = [math.sqrt(2 * noise_of**2 * 0.01**2 * tw / 10) for tw in (0.8, 0.2)]
    expected = torch.tensor([stds[0]] * 8 + [stds[1]] * 2) * ~mask
    assert noise.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert [float(part.norm()) for part in LAYOUT.split(updates[0])] == pytest.approx(
        [0.01 * math.sqrt(0.8), 0.01 * math.sqrt(0.2)], rel=1e-4
    ), "both layers are clipped to C_l"
    assert not updates[1][mask].any()


def test_published_mask_comes_from_the_noisy_upload_and_weights_from_raw_norms() -> None:
    method, s = FedGLPADP(variant="published", growth=0.25), replace(setting(z=None), epsilon=1.0)
    objective = method.client(s)
    local = local_for(linear())
    local.normal = lambda n: torch.tensor([0.0, 9, 0, 0, 0, 0, -9, 0, 0, 0])
    objective.begin(local)
    objective.step(local, X, Y)
    update = objective.finish(local)
    assert set(local.state["mask"].nonzero().flatten().tolist()) == {1, 6} == set(update.abs().topk(2).indices.tolist())
    assert local.state["norms"].tolist() != pytest.approx([float(p.norm()) for p in LAYOUT.split(update)], rel=0.5)


# --- what is charged, and what plans depend on -------------------------------------------------------------------------


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
@pytest.mark.parametrize("allocation", ["equal", "least"])
def test_each_round_costs_exactly_its_share_whatever_the_weights(view: View, allocation: str) -> None:
    s = setting(view)
    policy = planner(FedGLPADP(allocation=allocation, beta0=0.3, slope=0.0), s)  # type: ignore[arg-type]
    state = policy.start()
    for t in range(8):
        plan = policy.plan(Released(t, torch.zeros(10), None), state)
        assert plan_mu(plan, LAYOUT, 1) == pytest.approx(1 / 1.5, rel=1e-5)
        assert plan.place == ("upload" if view is View.SERVER else "sum")
        assert plan.layer_clip is not None
        assert float(plan.layer_clip.square().sum()) == pytest.approx(0.25, rel=1e-5)
        stds = plan.noise_std * torch.ones(2)
        vector = torch.randn(10, generator=torch.Generator().manual_seed(t)) * (1 + t % 3)
        state = policy.observe(state, Upload(0, t, vector, stds, plan, plan.support))
    if view is View.SERVER:
        assert int(state["mask"].sum()) == 0, "8 rounds at 0.3 / 20 of 8 coordinates are less than one"


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_the_ledger_adds_up_to_the_configured_epsilon(view: str) -> None:
    job = h.job_of(h.at_epsilon_8({"name": "fedglp-adp"}, f"privacy.view={view}", *ADAM))
    progress = h.trained(job)
    for client in range(6) if view == "server" else [-1]:
        spent = epsilon_of(math.sqrt(h.book(job).mu2(client)), 1e-3)
        assert 0.999 * 8.0 < spent <= 8.0
    clips = [row["layer_clip"] for row in progress.history]
    assert clips[2] != clips[0] == clips[1], "the first weights need two norms to move"
    shares = [row["mask_share"] for row in progress.history]
    assert shares == sorted(shares)
    assert shares[-1] > 0


def test_in_the_aggregate_view_masks_are_private_and_nothing_sent_depends_on_their_number() -> None:
    job = h.job_of(h.at_epsilon_8({"name": "fedglp-adp", "growth": 0.1}, "privacy.view=aggregate", *ADAM))
    progress = h.trained(job)
    masks = [progress.privates[c]["mask"] for c in range(6)]
    assert len({tuple(m.tolist()) for m in masks}) == 6
    assert all(e.coordinates == 650 for e in h.book(job).entries)
    assert all(0 < m.float().mean() <= personal_share(job.method, job.setting) for m in masks)  # type: ignore[arg-type]


def test_published_marks_what_it_reads_and_promises_nothing() -> None:
    config = h.at_epsilon_8({"name": "fedglp-adp", "variant": "published"}, "privacy.view=server", *ADAM)
    job = h.job_of(config)
    method, s = job.method, job.setting
    h.trained(job)
    assert all(isinstance(e.event, Unbounded) and e.reads == ("layer norms of earlier rounds",) for e in h.book(job).entries)
    assert all(isinstance(e, Unbounded) for view in View for e in method.releases(s, view))
    claim = method.claim(s)
    assert claim is not None
    assert claim.epsilon == pytest.approx(8.0, rel=1e-6)
    assert claim.scope == Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
    with pytest.raises(ConfigError, match="view = 'server'"):
        calibrated_setting(h.at_epsilon_8({"name": "fedglp-adp", "variant": "published"}))
    with pytest.raises(ConfigError, match="weight_decay"):
        h.job_of(h.at_epsilon_8({"name": "fedglp-adp"}, "training.optimizer.weight_decay=0.1"))


def test_a_second_round_of_published_uploads_leaves_personal_coordinates_out() -> None:
    method = {"name": "fedglp-adp", "variant": "published", "layers": "tensors", "growth": 0.1, "beta0": 0.5, "slope": 0.0}
    job = h.job_of(h.at_epsilon_8(method, "privacy.view=server", *ADAM))
    rows = h.trained(job).history
    sent = [e.coordinates for e in h.book(job).entries if e.client == 0]
    assert sent == [650, 650 - 64 - 1, 650 - 2 * 64 - 2, 650 - 3 * 64 - 3]
    assert rows[1]["uplink_bits"] == 32 * sent[1] + 650
    assert rows[0]["layer_clip"] == pytest.approx([0.5 * math.sqrt(n / 650) for n in (640, 10)])
    # Every client's noise on layer l is sigma C_l sqrt(L / n); all share all in round 0, so the mean's variance is 1 / n of it.
    noise = sigma(job.method, job.setting) * 0.5 * math.sqrt(2) / job.setting.cohort  # type: ignore[arg-type]
    assert rows[0]["layer_noise_std"] == pytest.approx([noise * math.sqrt(n / 650) for n in (640, 10)], rel=1e-5)
    assert rows[0]["noise_norm"] == pytest.approx(noise * math.sqrt((640 * 640 + 10 * 10) / 650), rel=1e-5)
    own = rows[1]["by_client"]
    assert [cells["client"] for cells in own] == list(range(job.setting.cohort))
    assert own[0]["mask_share"] == pytest.approx(2 * 65 / 650)  # after two rounds


def test_the_paper_counts_layers_of_the_network_and_noise_falls_by_the_root_of_two() -> None:
    """Weight and bias of a layer have one clip, one std and one personal share: L = 2 instead of 4 for two full layers."""
    layout = h.layout({"fc1.weight": (6, 4), "fc1.bias": (6,), "fc2.weight": (2, 6), "fc2.bias": (2,)})
    merged = network_layers(layout)
    assert (merged.names, merged.sizes) == (("fc1", "fc2"), [30, 14])
    assert network_layers(LAYOUT).names == ("a", "b")
    power = {}
    for layers in ("network", "tensors"):
        method = FedGLPADP(variant="published", layers=layers, growth=0.2, beta0=0.5, slope=0.0)  # type: ignore[arg-type]
        objective = TwoLosses(method, replace(setting(), layout=layout), 0.5, sigma=3.0)
        local = h.local_of(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)), normal=torch.ones)
        local.model.layout = layout
        objective.begin(local)
        local.model.vector.add_(torch.arange(44.0))
        update = objective.finish(local)
        assert local.noise_power is not None
        power[layers] = float(local.noise_power.sum())
        own = merged if layers == "network" else layout
        assert [int(part.sum()) for part in own.split(local.state["mask"])] == [int(0.2 * n) for n in own.sizes]
        clips = [0.5 * math.sqrt(n / 44) for n in own.sizes]
        noise = [3.0 * c * math.sqrt(len(own) / 10) for c in clips]
        moved = [float((part - n).norm()) for part, n in zip(own.split(update), noise, strict=True)]
        assert moved == pytest.approx(clips, rel=1e-4), "each layer is clipped to C_l as a whole"
        of = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1, "fc2.bias": 1} if layers == "network" else {}
        expected = [clips[of.get(name, i)] for i, name in enumerate(layout.names)]
        assert objective.measures(local.state)["layer_clip"] == pytest.approx(expected)
    by_hand = {
        layers: len(own) / 10 * 9 * 0.25 * sum(n * n / 44 for n in own.sizes)
        for layers, own in (("network", merged), ("tensors", layout))
    }
    assert power == pytest.approx(by_hand, rel=1e-5)
    with pytest.raises(ConfigError, match="clips by tensors"):
        FedGLPADP(layers="network").calibrate(setting())


def test_flat_clipping_has_one_clip_and_the_noise_of_dp_fedavg() -> None:
    """No factor L: std sigma C / sqrt(n) on each upload, 1 / n of its variance on the mean of the first round."""
    method = {"name": "fedglp-adp", "variant": "published", "clipping": "flat"}
    job = h.job_of(h.at_epsilon_8(method, "privacy.view=server", *ADAM))
    n, noise = job.setting.cohort, sigma(job.method, job.setting) * 0.5  # type: ignore[arg-type]
    row = h.trained(job).history[0]
    assert row["layer_noise_std"] == pytest.approx([noise / n] * 2, rel=1e-5)
    assert row["noise_norm"] == pytest.approx(noise / n * math.sqrt(650), rel=1e-5)
    objective = job.method.client(job.setting)
    assert isinstance(objective, TwoLosses)
    local = h.local_of(torch.nn.Linear(2, 2), start=torch.zeros(6), normal=torch.zeros)
    local.scratch["shared"] = torch.ones(6, dtype=torch.bool)
    update = torch.tensor([3.0, 0, 0, 0, 4.0, 0])  # norm 5 over both layers, clipped to 0.5 as a whole
    assert objective._noised(local, update, 1.0).tolist() == pytest.approx([0.3, 0, 0, 0, 0.4, 0], rel=1e-5)


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_flat_clipping_proven_costs_the_same(view: str) -> None:
    job = h.job_of(h.at_epsilon_8({"name": "fedglp-adp", "clipping": "flat"}, f"privacy.view={view}"))
    plan = job.context.policy.plan(Released(0, job.context.model.vector, None), job.context.policy.start())
    assert isinstance(plan, Plan)
    assert (plan.clip, plan.layer_clip, plan.noise_std) == (0.5, None, job.setting.z * 0.5)
    assert plan_mu(plan, job.setting.layout, job.setting.scope.update_factor) == pytest.approx(
        job.setting.scope.update_factor / job.setting.z
    )


# --- learning ----------------------------------------------------------------------------------------------------------


def label_skewed(**method: Any) -> dict[str, Any]:
    return {
        "data": {"partition": {"kind": "dirichlet", "clients": 60, "alpha": 0.1}, "client_test_fraction": 0.3},
        "model": {"name": "linear"},
        "method": {"name": "fedglp-adp", **method},
        "training": {"rounds": 15, "batch_size": 16, "optimizer": {"name": "adam", "lr": 0.01}, "evaluate_every": 15},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "run": {"seeded_noise": True},
    }


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("seeds", "above"), [((2,), 0.25), pytest.param((0, 1, 2), 0.3, marks=pytest.mark.slow)], ids=["one seed", "three seeds"]
)
def test_learns_and_personal_models_serve_skewed_clients_better(seeds: tuple[int, ...], above: float, tmp_path: Path) -> None:
    accuracies = []
    for seed in seeds:
        configuration = label_skewed(personal_model="combined")
        configuration["run"] = {"seeded_noise": True, "seed": seed}
        result = run(configure(**configuration), tmp_path / str(seed))
        last = result.history[-1]
        own, common = last["mean_personal_accuracy"], [a for a in last["client_accuracy"] if a is not None]
        accuracies.append(result.accuracy)
        assert own > 0.55
        assert own > sum(common) / len(common) + 0.1
    assert sum(accuracies) / len(seeds) > above  # of one run 0.29 to 0.5
    with (tmp_path / "2" / "private" / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [r["personal"] for r in rows[:3]] == ["" if a is None else str(a) for a in last["personal_accuracy"][:3]]


def test_record_level_noise_inside_training_goes_with_the_mask() -> None:
    config = h.at_epsilon_8({"name": "fedglp-adp", "growth": 0.1}, "training.local=dp-sgd", "privacy.unit=record", clients=3)
    job = h.job_of(config)
    progress = h.trained(job)
    assert progress.history[-1]["test_accuracy"] > 0.35
    assert all(e.event.count == job.setting.steps for e in h.book(job).entries)  # type: ignore[union-attr]


def test_pool_and_inline_agree_on_private_state() -> None:
    config = h.at_epsilon_8({"name": "fedglp-adp", "growth": 0.1}, "privacy.view=server", *ADAM, rounds=3)
    models = []
    for engine in (Inline, lambda context: ProcessPool(context, workers=2)):
        job = h.job_of(config)
        progress = start(job)
        fit(job, engine(job.context), progress)
        models.append((progress.model, progress.privates[2]["personal"]))
    assert torch.equal(models[0][0], models[1][0])
    assert torch.equal(models[0][1], models[1][1])


@pytest.mark.parametrize("path", [p for p in h.presets("fedglp-adp") if "proven" not in p.stem], ids=lambda p: p.stem)
def test_presets_of_the_paper_calibrate(path: Path) -> None:
    method, s = calibrated_setting(load_config(path))
    assert method.name == "fedglp-adp"
    assert method.releases(s, s.scope.view)
    assert (s.cohort, s.delta, s.local.batch_size) == (10, 0.1, 16)
