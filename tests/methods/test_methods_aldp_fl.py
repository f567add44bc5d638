"""ALDP-FL: window, clips per layer and bounded noise as published; what the proven variant reads, costs and adapts to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fedveil.accounting.types import Adjacency, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import plan_mu
from fedveil.mechanism.plan import Raw
from fedveil.methods.method_registry import method_from
from fedveil.papers.aldp_fl import claim as truncated
from fedveil.papers.aldp_fl.method import ALDPFL, BoundedNoise, bound_of, truncated_normal, truncated_variance
from fedveil.training.local import BatchGradient, Local, train
from method_kit import (
    LAYERS,
    LAYOUT,
    Layers,
    digits,
    job_of,
    local_of,
    planner,
    released,
    setting,
    trained,
    upload,
)

# --- bounded noise ---


def test_bound_by_hand() -> None:
    """Equation 3: epsilon = ln 4, eta = 1/2: 3.5 / 4.5; eta = 0: 1."""
    assert bound_of(math.log(4), 0.5) == pytest.approx(7 / 9)
    assert bound_of(2.0, 0.0) == 1.0
    assert bound_of(3.0, -0.9) == pytest.approx(truncated.bound_of(3.0, -0.9))
    assert bound_of(1000.0, 0.5) == 1.0


def variance_of_equation_8(std: float, bound: float) -> float:
    """sigma^2 (1 - 2 (b/sigma) phi(b/sigma) / (2 Phi(b/sigma) - 1))."""
    r = bound / std
    return float(std**2 * (1 - 2 * r * stats.norm.pdf(r) / (2 * stats.norm.cdf(r) - 1)))


@pytest.mark.parametrize(("std", "bound"), [(1.0, 0.5), (1.0, 1.0), (2.0, 3.0), (0.1, 1.0)])
def test_noise_is_a_truncated_gaussian(std: float, bound: float) -> None:
    """Never outside, the variance of equation 8 within 2 %, and the distribution itself by Kolmogorov and Smirnov."""
    n = 100_000
    noise = truncated_normal(torch.randn(n, generator=torch.Generator().manual_seed(0)), torch.full((n,), std), bound)
    assert float(noise.abs().max()) <= bound
    assert float(noise.double().var()) == pytest.approx(variance_of_equation_8(std, bound), rel=0.02)
    exact = stats.truncnorm(-bound / std, bound / std, scale=std)
    assert stats.kstest(noise[:20_000].numpy(), exact.cdf).pvalue > 1e-3


@pytest.mark.parametrize(("std", "bound"), [(1.0, 1.0), (2.0, 3.0), (1.0, 2.0)])
def test_the_same_checks_reject_clamped_and_wrongly_scaled_noise(std: float, bound: float) -> None:
    draws = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    exact = stats.truncnorm(-bound / std, bound / std, scale=std)
    for wrong in (
        (draws * std).clamp(-bound, bound),
        truncated_normal(draws, torch.full_like(draws, std * 1.5), bound),
        truncated_normal(draws, torch.full_like(draws, std / 1.5), bound),
    ):
        assert stats.kstest(wrong[:20_000].numpy(), exact.cdf).pvalue < 1e-3


@given(st.floats(-30, 30), st.floats(0, 1e6), st.floats(1e-6, 1))
def test_noise_never_leaves_its_bound(standard: float, std: float, bound: float) -> None:
    x = truncated_normal(torch.tensor([standard]), torch.tensor([std]), bound)
    assert bool((x.abs() <= bound * (1 + 1e-7)).all())
    assert x.item() * standard >= 0 or abs(x.item()) < 1e-6


def test_no_clip_no_noise() -> None:
    assert truncated_normal(torch.ones(3), torch.zeros(3), 0.5).tolist() == [0.0] * 3


# --- published training ---


@dataclass
class Moves:
    """A gradient source that moves each layer's first coordinate as told, batch by batch."""

    moves: list[tuple[float, float]]
    done: list[Tensor] = field(default_factory=list)

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        self.done.append(local.model.vector.clone())
        a, b = self.moves[local.step]
        local.model.grad.copy_(torch.tensor([-a, 0, 0, -b, 0, 0, 0]))
        return torch.zeros(())

    batches = BatchGradient.batches


def client(moves: list[tuple[float, float]], state: dict[str, Any] | None = None, normal: float = 0.0) -> Local:
    steps = {"local_steps": len(moves), "batch_size": 5, "optimizer": {"lr": 1.0}}
    local = local_of(Layers(LAYERS), Moves(moves), training=steps, state=dict(state or {}))
    local.normal = lambda n: torch.full((n,), normal)
    return local


def moved(
    moves: list[tuple[float, float]], state: dict[str, Any] | None = None, normal: float = 0.0, **options: Any
) -> tuple[list[float], dict[str, Any]]:
    """The two layers' first coordinates after the moves at rate 1 with given standard normals, and the private state."""
    local = client(moves, state, normal)
    objective = BoundedNoise(ALDPFL(variant="published", **options), 4.0, 1e-7)
    update, _ = train(local, torch.zeros(10, 1), torch.zeros(10, dtype=torch.long), objective)
    return [float(update[0]), float(update[3])], local.state


def test_clip_is_the_mean_of_the_last_k_norms_layer_by_layer() -> None:
    """k = 3. a: 1 | 4 -> 2.5 | 1 | 7 -> mean(4, 1, 7) = 4. b: 2 | 1 | 1 | 3 -> mean(1, 1, 3) = 5/3."""
    update, state = moved([(1, 2), (4, 1), (1, 1), (7, 3)])
    assert update == pytest.approx([1 + 2.5 + 1 + 4, 2 + 1 + 1 + 5 / 3])
    assert state["window"].tolist() == [[4, 1], [1, 1], [7, 3]]
    assert set(state) == {"window", "clips"}
    assert state["clips"].tolist() == pytest.approx([4, 5 / 3])


def test_the_window_outlives_the_round_and_has_k_norms() -> None:
    """The next round begins with the norms of the last: k = 2, mean(1, 5) = 3."""
    _, state = moved([(3, 3), (1, 1)], window=2)
    assert moved([(5, 0.5)], state, window=2)[0] == pytest.approx([3.0, 0.5])
    assert moved([(5, 0.5)], window=2)[0] == pytest.approx([5.0, 0.5])
    assert moved([(1, 1), (2, 2), (9, 9)], window=1)[0] == pytest.approx([12.0, 12.0])


def test_noise_of_an_iteration_by_hand() -> None:
    """std = 2 Clip / |D| * sqrt(2 ln(1.25e7)) / 4 with |D| = 10, Clip = the norm; standard normals of 1."""
    update, _ = moved([(0.5, 0.25)], normal=1.0)
    std = torch.tensor([2 * c / 10 * math.sqrt(2 * math.log(1.25e7)) / 4 for c in (0.5, 0.25)])
    noise = truncated_normal(torch.ones(2), std, bound_of(4.0, 0.5))
    assert update == pytest.approx([0.5 + float(noise[0]), 0.25 + float(noise[1])], rel=1e-6)
    assert float(std[1]) == pytest.approx(float(noise[1]), rel=0.01)


def test_d_of_the_sensitivity_may_be_a_batch() -> None:
    """2 Clip / 5 in place of 2 Clip / 10: twice the noise; of a client with fewer examples than a batch, all its examples."""
    dataset, batch = (moved([(0.02, 0.01)], normal=1.0, sensitivity=d)[0] for d in ("dataset", "batch"))
    assert batch[0] - 0.02 == pytest.approx(2 * (dataset[0] - 0.02), rel=1e-4)
    few = Tensor(3, 1).zero_()
    local = client([(0.02, 0.01)], normal=1.0)
    update, _ = train(local, few, few[:, 0].long(), BoundedNoise(ALDPFL(variant="published", sensitivity="batch"), 4.0, 1e-7))
    assert float(update[0]) - 0.02 == pytest.approx(10 / 3 * (dataset[0] - 0.02), rel=1e-4)


def test_the_noise_of_training_is_recorded() -> None:
    """Three iterations of one norm: three times the variance of equation 8, for each coordinate of a layer."""
    local = client([(0.5, 0.25)] * 3)
    train(local, torch.zeros(10, 1), torch.zeros(10, dtype=torch.long), BoundedNoise(ALDPFL(variant="published"), 0.05, 1e-7))
    stds = [2 * c / 10 * math.sqrt(2 * math.log(1.25e7)) / 0.05 for c in (0.5, 0.25)]
    variances = [variance_of_equation_8(std, bound_of(0.05, 0.5)) for std in stds]
    assert variances[0] < 0.1 * stds[0] ** 2  # the truncation matters
    assert local.noise_power is not None
    assert local.noise_power.tolist() == pytest.approx(
        [3 * v * n for v, n in zip(variances, local.model.layout.sizes, strict=True)]
    )


@pytest.mark.parametrize("std", [1e-9, 0.01, 0.3, 1.0, 50.0, 1e6])
def test_variance_of_truncated_noise(std: float) -> None:
    wanted = variance_of_equation_8(std, 0.4) if std < 100 else 0.4**2 / 3
    assert float(truncated_variance(torch.tensor([std, 0.0]), 0.4)[0]) == pytest.approx(wanted, rel=1e-5)
    assert float(truncated_variance(torch.tensor([std, 0.0]), 0.4)[1]) == 0


def test_no_step_leaves_without_clip_and_noise() -> None:
    """Batches of 5 of 10 examples, an iteration is a pass: the third batch is no whole pass, and is bounded all the same."""
    update, _ = moved([(1, 0), (2, 0), (9, 0)], noise_every="epoch")
    assert update[0] == pytest.approx(3 + (3 + 9) / 2)
    noisy, _ = moved([(1, 0)], noise_every="epoch", normal=1.0)
    assert noisy[0] > 1


def test_an_iteration_may_be_a_pass_over_the_data() -> None:
    """10 examples in batches of 5: two batches an iteration; their sum is clipped to mean(3, 7) = 5."""
    assert moved([(1, 0), (2, 0), (3, 0), (4, 0)], noise_every="epoch")[0][0] == pytest.approx(3 + 5)
    assert moved([(1, 0), (2, 0), (3, 0), (4, 0)])[0][0] == pytest.approx(1 + 1.5 + 2 + 3)


def test_published_is_marked_and_proves_nothing() -> None:
    m = ALDPFL(variant="published")
    s = setting(epsilon=4.0, noise_multiplier=None)
    answer = planner(m, s).plan(released([0.0] * 7), {})
    assert isinstance(answer, Raw)
    assert answer.reads == ("layer norms",)
    assert math.isinf(answer.make(torch.ones(7)).clip)
    assert all(isinstance(e, Unbounded) for view in View for e in m.releases(s, view))
    claim = m.claim(s)
    assert claim is not None
    assert (claim.epsilon, claim.delta, claim.scope.unit) == (4.0, s.delta, Unit.RECORD)
    with pytest.raises(ConfigError, match=r"privacy\.epsilon"):
        m.calibrate(setting())


# --- proven ---


def test_first_clips_share_the_clip_by_size() -> None:
    policy = planner(ALDPFL(clip=0.7), setting())
    plan = policy.plan(released([0.0] * 7), policy.start())
    assert plan.layer_clip is not None
    assert plan.layer_clip.tolist() == pytest.approx([0.7 * math.sqrt(3 / 7), 0.7 * math.sqrt(4 / 7)])
    assert (plan.place, plan.clamp) == ("upload", 1.0)
    assert planner(ALDPFL(clip=0.7), setting(View.AGGREGATE)).plan(released([0.0] * 7), policy.start()).clamp == 4.0


def test_clips_are_the_mean_of_the_last_released_norms_without_their_noise() -> None:
    """Norms (3, 4), (0, 2) and (6, 0) released exactly, k = 2: mean (3, 1); then with noise 1 on 3 and 4 coordinates."""
    policy = planner(ALDPFL(window=2, headroom=1.0, clip_range=(1e-6, 100.0)), setting())
    state = policy.start()
    for a, b in ((3.0, 4.0), (0.0, 2.0), (6.0, 0.0)):
        state = policy.observe(state, upload([a, 0, 0, b, 0, 0, 0], [0.0] * 7))
    plan = policy.plan(released([0.0] * 7), state)
    assert plan.layer_clip is not None
    assert plan.layer_clip.tolist() == pytest.approx([3.0, 1.0])
    state = policy.observe(policy.start(), upload([2.0, 0, 0, 1.0, 0, 0, 0], [0.0] * 7, noise_std=1.0))
    assert state["norms"].tolist() == [pytest.approx([1.0, 0.0])]


def test_clips_have_headroom_and_stay_in_range() -> None:
    policy = planner(ALDPFL(clip=1.0, headroom=1.5, clip_range=(0.5, 2.0)), setting())
    first = policy.start()["first"]
    state = policy.observe(policy.start(), upload([0.8, 0, 0, 100.0, 0, 0, 0], [0.0] * 7))
    clips = policy.plan(released([0.0] * 7), state).layer_clip
    assert clips is not None
    assert clips.tolist() == pytest.approx([1.2, 2 * float(first[1])])
    state = policy.observe(policy.start(), upload([0.0] * 7, [0.0] * 7))
    clips = policy.plan(released([0.0] * 7), state).layer_clip
    assert clips is not None
    assert clips.tolist() == pytest.approx((first / 2).tolist())
    with pytest.raises(ConfigError, match="lowest"):
        method_from({"name": "aldp-fl", "clip_range": [2.0, 1.0]})


@pytest.mark.parametrize(("options", "most"), [({}, 1.0), ({"clip_range": (0.5, 4.0)}, 4.0)])
def test_noise_alone_does_not_drive_the_default_clips_up(options: dict[str, Any], most: float) -> None:
    """Clients who send nothing, under noise of 20 clips: it is taken for movement, and may not raise itself."""
    policy, noise = planner(ALDPFL(**options), setting(noise_multiplier=20.0)), torch.Generator().manual_seed(1)
    state, highest = policy.start(), 0.0
    for _ in range(30):
        plan = policy.plan(released([0.0] * 7), state)
        assert isinstance(plan.noise_std, Tensor)
        assert plan.layer_clip is not None
        highest = max(highest, float((plan.layer_clip / state["first"]).max()))
        std = plan.noise_std.repeat_interleave(torch.tensor(LAYOUT.sizes))
        sent = replace(upload([0.0] * 7, [0.0] * 7), vector=std * torch.randn(7, generator=noise), noise_std=plan.noise_std)
        state = policy.observe(state, sent)
    assert highest == pytest.approx(most)


def test_noise_by_hand_in_both_allocations() -> None:
    """C = (1, 2), z = 2, sizes 3 and 4: equal z C sqrt 2; least: sigma_l^2 = 4 (C_l / sqrt n_l)(sqrt 3 + 2 sqrt 4)."""
    state = {"first": torch.tensor([1.0, 2.0]), "norms": torch.empty((0, 2))}
    equal = planner(ALDPFL(allocation="equal"), setting()).plan(released([0.0] * 7), state).noise_std
    least = planner(ALDPFL(allocation="least"), setting()).plan(released([0.0] * 7), state).noise_std
    assert isinstance(equal, Tensor)
    assert isinstance(least, Tensor)
    assert equal.tolist() == pytest.approx([2 * math.sqrt(2), 4 * math.sqrt(2)])
    total = math.sqrt(3) + 2 * math.sqrt(4)
    assert least.tolist() == pytest.approx([2 * math.sqrt(total / math.sqrt(3)), 2 * math.sqrt(total * 2 / math.sqrt(4))])
    sizes = torch.tensor([3.0, 4.0])
    assert float((sizes * least**2).sum()) < float((sizes * equal**2).sum())


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=7, max_size=7),
    st.floats(0, 3),
    st.sampled_from(["equal", "least"]),
    st.sampled_from(list(View)),
    st.sampled_from(list(Adjacency)),
)
def test_every_plan_costs_exactly_its_share(
    vector: list[float], std: float, allocation: str, view: View, adjacency: Adjacency
) -> None:
    s = setting(view, adjacency=adjacency)
    policy = planner(ALDPFL(allocation=allocation), s)  # type: ignore[arg-type]
    plan = policy.plan(released([0.0] * 7), policy.observe(policy.start(), upload(vector, [0.0] * 7, std)))
    assert plan_mu(plan, s.layout, adjacency.factor) == pytest.approx(adjacency.factor / 2.0, rel=1e-6)


def test_released_coordinates_stay_within_the_bound(tmp_path: Path) -> None:
    """Noise std far above b' = 0.01: the mean of the round cannot leave it either."""
    config = digits({"name": "aldp-fl", "bound": 0.01}, privacy={"noise_multiplier": 50.0}, training={"rounds": 1})
    job = job_of(config, tmp_path / "l")
    begin = job.context.model.vector.clone()
    step = trained(job).model - begin
    assert float(step.abs().max()) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.heavy
def test_published_learns(tmp_path: Path) -> None:
    """The paper's epsilon of 4 a batch: with noise relative to 1 / |D| of the clip, above 0.7 after 5 rounds."""
    training = {"rounds": 5, "local_epochs": 5, "optimizer": {"name": "adam", "lr": 0.01}}
    privacy = {"epsilon": 4.0, "delta": 1e-7, "view": "server"}
    config = digits({"name": "aldp-fl", "variant": "published"}, training=training, privacy=privacy)
    progress = trained(job_of(config, tmp_path / "l"))
    assert progress.history[-1]["test_accuracy"] > 0.7
    assert all(set(state) == {"window", "clips"} for state in progress.privates.values())
    last = progress.history[-1]
    clips = [progress.privates[cells["client"]]["clips"] for cells in last["by_client"]]
    assert [cells["clip"] for cells in last["by_client"]] == pytest.approx([float(c.norm()) for c in clips])
    assert last["layer_clip"] == pytest.approx(torch.stack(clips).mean(0).tolist())
    assert last["noise_norm"] > 0
    assert last["cumulative_noise_norm"] == pytest.approx(sum(row["noise_norm"] for row in progress.history))
