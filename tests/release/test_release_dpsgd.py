"""DP-SGD inside a client: per-example gradients, clipping, noise, Poisson batches, accounting."""

from __future__ import annotations

import itertools
import math
from functools import partial

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import pld_privacy_accountant
from scipy import stats
from torch import nn
from torch.nn import functional as F

from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Adjacency, SampledGaussian
from fedveil.data.catalogue import IGNORED
from fedveil.errors import ConfigError
from fedveil.experiment.config import configure
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.gradients.gradient_blocks import rows
from fedveil.gradients.per_example import per_example_gradients
from fedveil.mechanism.cost import step_sensitivity
from fedveil.mechanism.plan import DpSgd
from fedveil.models.model_registry import build
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.tasks.classification import Binary, Classification
from fedveil.tasks.task import Task
from fedveil.tasks.task_registry import task_from
from fedveil.training.local import Local, LocalSpec, OptimizerSpec, Plain, train
from fedveil.training.params import FlatModel


def small(name: str = "mlp", shape: tuple[int, ...] = (1, 8, 8), n: int = 6) -> tuple[FlatModel, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return FlatModel(build(name, shape, 10, 1)), torch.randn(n, *shape, generator=g), torch.randint(0, 10, (n,), generator=g)


def plan_of(clip: float, z: float, rate: float, steps: int, expected: float = 1.0, cap: int = 1000) -> DpSgd:
    return DpSgd(clip, z, rate, steps, expected, cap)


def source_of(plan: DpSgd, *, seeded: bool = True) -> PerExampleGradient:
    return PerExampleGradient(plan, Randomness(5, seeded), (0, 0))


def local_with(plan: DpSgd, model: FlatModel, *, seeded: bool = True) -> tuple[Local, PerExampleGradient]:
    source = source_of(plan, seeded=seeded)
    return Local(model, model.vector.clone(), LocalSpec(), source, torch.Generator()), source


def gradients(plan: DpSgd, model: FlatModel, x: torch.Tensor, y: torch.Tensor, *, seeded: bool = True) -> list[torch.Tensor]:
    """What each step of a round lets training see."""
    local, source = local_with(plan, model, seeded=seeded)
    seen = []
    for step, batch in enumerate(source.batches(local, x, y)):
        local.step = step
        assert math.isnan(float(source(local, *batch)))
        seen.append(model.grad.clone())
    return seen


def test_each_example_is_clipped_and_the_divisor_is_the_public_one() -> None:
    model, x, y = small()
    flat = rows(per_example_gradients(model.module, x, y, Classification().losses)[0])
    clip = float(flat.norm(dim=1).median())
    (seen,) = gradients(plan_of(clip, 0.0, 1.0, 1, expected=10.0), model, x, y)
    factors = (clip / flat.norm(dim=1)).clamp_max(1.0)
    torch.testing.assert_close(seen, (flat * factors[:, None]).sum(0) / 10, rtol=1e-4, atol=1e-6)
    assert 0 < int((factors < 1).sum()) < len(y)


def test_one_example_moves_the_gradient_by_at_most_the_clip() -> None:
    model, x, y = small()
    grads = [gradients(plan_of(0.1, 0.0, 1.0, 1), model, x[:n], y[:n])[0] for n in (6, 5)]
    assert 0.099 < float((grads[0] - grads[1]).double().norm()) <= 0.1 * (1 + 1e-7)  # both are rounded to float32


def test_one_example_moves_the_gridded_sum_by_at_most_the_charged_sensitivity() -> None:
    """The same noise with and without one example: what is left is what the ledger must bound, rounding to the grid included."""
    for seed, z in itertools.product(range(20), (1e-5, 0.7, 3.0, 64.0)):
        model, x, y = small(n=7)
        x = x * 10.0 ** (seed % 5 - 2)
        plan = plan_of(0.1, z, 1.0, 1)
        local, source = local_with(plan, model)
        sums = []
        for n in (7, 6):
            source._batch = x[:n], y[:n]
            source(local, x[:0], y[:0])
            sums.append(model.grad.double())
        bound = step_sensitivity(plan, model.layout.dimension, Adjacency.ZERO_OUT)
        float32 = 2.0**-24 * sum(float(s.norm()) for s in sums)  # of the gradient that training sees: post-processing
        moved = float((sums[0] - sums[1]).norm())
        assert 0.09 < moved <= bound + float32
        assert bound < 0.1 * (1 + 1e-5 * (1 + z))


@pytest.mark.parametrize("seeded", [True, False])
def test_step_noise_is_statistically_right_and_two_thirds_or_three_halves_fail(seeded: bool) -> None:
    model, x, y = small()
    d = model.layout.dimension
    (seen,) = gradients(plan_of(0.3, 2.0, 1.0, 1), model, x[:0], y[:0], seeded=seeded)  # an empty batch still carries its noise
    square = float((seen.double() ** 2).sum())
    lo, hi = stats.chi2.ppf([1e-7, 1 - 1e-7], d)
    assert lo < square / 0.6**2 < hi
    for wrong in (2 / 3, 3 / 2):
        assert not lo < square / (0.6 * wrong) ** 2 < hi


@pytest.mark.parametrize("seeded", [True, False])
def test_noise_is_fresh_in_every_step(seeded: bool) -> None:
    model, x, y = small()
    seen = gradients(plan_of(0.3, 5.0, 1.0, 3), model, x, y, seeded=seeded)
    assert float((torch.corrcoef(torch.stack(seen)) - torch.eye(3)).abs().max()) < 0.2


def test_poisson_batches_have_the_planned_rate_and_number() -> None:
    model, x, y = small(n=6)
    x, y = x.repeat(50, 1, 1, 1), y.repeat(50)
    local, source = local_with(plan_of(1.0, 1.0, 0.2, 40), model)
    sizes = []
    for _ in source.batches(local, x, y):
        assert source._batch is not None
        sizes.append(len(source._batch[1]))
        source(local, x[:0], y[:0])
    assert len(sizes) == 40
    assert len(set(sizes)) > 5
    # 40 draws of Bin(300, 0.2): mean 60, standard error 1.1
    assert abs(float(np.mean(sizes)) - 60) < 5.5


def test_a_batch_holds_whoever_s_coin_fell_among_the_first_examples_whatever_the_others_do() -> None:
    """With a cap on the batch instead, an example that comes would take another one's place, which sampling does not price."""
    model, x, y = small(n=6)
    x, y = x.repeat(50, 1, 1, 1), y.repeat(50)
    x[:, 0, 0, 0] = torch.arange(300.0)
    local, source = local_with(plan_of(1.0, 1.0, 0.9, 20, cap=100), model)
    for step, _ in enumerate(source.batches(local, x, y)):
        assert source._batch is not None
        chosen = source.randomness.coins(0.9, 100, "examples", *source.key, step).tolist()
        assert source._batch[0][:, 0, 0, 0].tolist() == chosen
        source(local, x[:0], y[:0])


def test_training_without_noise_follows_the_clipped_sum() -> None:
    model, x, y = small()
    source = PerExampleGradient(plan_of(1e6, 0.0, 1.0, 2, expected=6.0), Randomness(1, True), (0, 0))
    spec = LocalSpec(steps=2, batch_size=6, optimizer=OptimizerSpec(lr=0.1))
    start = model.vector.clone()
    update, loss = train(Local(model, start, spec, source, torch.Generator()), x, y, Plain())
    other, _, _ = small()
    w, losses = other.vector, []
    for _ in range(2):
        other.grad.zero_()
        value = F.cross_entropy(other.module(x), y)
        value.backward()  # type: ignore[no-untyped-call]
        losses.append(float(value.detach()))
        w.sub_(other.grad, alpha=0.1)
    torch.testing.assert_close(update, w - start, rtol=1e-3, atol=1e-5)
    assert loss == pytest.approx(sum(losses) / 2, rel=1e-5)


# --- what data can do ---


@pytest.mark.parametrize("name", ["mlp", "lenet5"])
@pytest.mark.parametrize("value", [3e38, math.inf, -math.inf, math.nan])
def test_an_example_without_a_finite_gradient_counts_as_zero(name: str, value: float) -> None:
    shape = (1, 8, 8) if name == "mlp" else (1, 28, 28)
    model, x, y = small(name, shape)
    x[2] = value
    with_it, without = (gradients(plan_of(0.5, 1.0, 1.0, 1), model, x[keep], y[keep])[0] for keep in (range(6), [0, 1, 3, 4, 5]))
    assert with_it.isfinite().all()
    # not to the bit: the other examples' gradients are computed in a batch of another size
    torch.testing.assert_close(with_it, without, rtol=0, atol=1e-5)
    flat = rows(per_example_gradients(model.module, x, y, Classification().losses)[0])
    assert not flat[2].isfinite().all(), "this value must break the plain gradient, or nothing is tested"


def test_an_example_whose_gradient_raises_an_error_counts_as_zero(caplog: pytest.LogCaptureFixture) -> None:
    """A label that the model does not have: the batch cannot be done at once, and the others count as ever."""
    model, x, y = small()
    y[2] = 77
    with_it = gradients(plan_of(0.5, 1.0, 1.0, 1), model, x, y)[0]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "client 0, round 0: an example counts as zero" in caplog.text
    without = gradients(plan_of(0.5, 1.0, 1.0, 1), model, x[[0, 1, 3, 4, 5]], y[[0, 1, 3, 4, 5]])[0]
    torch.testing.assert_close(with_it, without, rtol=0, atol=1e-5)
    alone = gradients(plan_of(0.5, 1.0, 1.0, 1), model, x[2:3], y[2:3])[0]
    assert torch.equal(alone, gradients(plan_of(0.5, 1.0, 1.0, 1), model, x[:0], y[:0])[0])


@pytest.mark.parametrize(("dimension", "cap", "excess"), [(61_706, 1_000, 1.50e-5), (11_200_000, 64, 2.00e-4)])
def test_what_is_charged_beyond_the_clip(dimension: int, cap: int, excess: float) -> None:
    """By hand at z = 1: h sqrt(d) = 2^-24 sqrt(d), and at most 2e-7 for norms and sums in float64."""
    plan = plan_of(1.0, 1.0, 1.0, 1, cap=cap)
    charged = step_sensitivity(plan, dimension, Adjacency.ZERO_OUT) - 1.0
    rounding = 2.0**-24 * math.sqrt(dimension)
    assert rounding < charged < rounding + 2e-7
    assert charged == pytest.approx(excess, rel=0.005)
    assert step_sensitivity(plan, dimension, Adjacency.REPLACE_ONE) == pytest.approx(2 * (1 + charged), rel=1e-12)


def test_so_little_noise_that_a_batch_would_overflow_the_grid() -> None:
    model, x, y = small()
    plan = plan_of(0.5, 1e-12, 1.0, 1, cap=10_000)
    (seen,) = gradients(plan, model, x, y)
    (bare,) = gradients(plan_of(0.5, 0.0, 1.0, 1), model, x, y)
    torch.testing.assert_close(seen, bare, rtol=1e-5, atol=1e-9)
    alone = step_sensitivity(plan, model.layout.dimension, Adjacency.ZERO_OUT)
    assert alone == pytest.approx(0.5, rel=1e-5)
    assert step_sensitivity(plan, model.layout.dimension, Adjacency.REPLACE_ONE) >= 2 * alone  # each is compared with neither


# --- what an objective can do ---


def test_an_objective_gets_nothing_but_noisy_gradients() -> None:
    """The batches are empty, share no memory with the examples, and there is one gradient a step, no more and no less."""
    model, x, y = small()
    local, source = local_with(plan_of(0.5, 1.0, 1.0, 3), model)
    batches = source.batches(local, x, y)
    bx, by = next(batches)
    assert (tuple(bx.shape), tuple(by.shape)) == ((0, 1, 8, 8), (0,))
    for empty in (bx, by):
        assert empty._base is None
        assert empty.untyped_storage().nbytes() == 0
    source(local, bx, by)
    with pytest.raises(ConfigError, match="only once in each step: each costs a release"):
        source(local, bx, by)
    next(batches)
    with pytest.raises(ConfigError, match="once in each step; it did not in step 1"):
        next(batches)


def record_config(**privacy: object) -> object:
    return configure(
        data={"partition": {"kind": "iid", "clients": 4}},
        model="linear",
        method={"name": "fedavg"},
        training={"rounds": 3, "batch_size": 32, "local": "dp-sgd"},
        privacy={"delta": 1e-5, "unit": "record", **privacy},
    )


def test_epsilon_agrees_with_dp_accounting() -> None:
    method, setting = calibrated_setting(record_config(noise_multiplier=1.1))  # type: ignore[arg-type]
    (event,) = method.releases(setting, setting.scope.view)
    assert isinstance(event, SampledGaussian)
    step = setting.dp_sgd()
    assert step is not None
    assert event.count == 3 * math.ceil(setting.records / 32)
    ours, _ = bound([event], 1e-5, adjacency=Adjacency.ZERO_OUT)
    accountant = pld_privacy_accountant.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(step.rate, dp_accounting.GaussianDpEvent(1.1)), event.count)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_calibration_reaches_the_configured_epsilon() -> None:
    method, setting = calibrated_setting(record_config(epsilon=3.0))  # type: ignore[arg-type]
    spent, _ = bound(method.releases(setting, setting.scope.view), 1e-5, adjacency=setting.scope.adjacency)
    assert 2.99 < spent <= 3.0


class Words(torch.nn.Module):
    """Looks words up; torch writes into the table whenever one of them is longer than `max_norm`."""

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.table, self.last = torch.nn.Embedding(9, 5, max_norm=max_norm), torch.nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.table(x).sum(1))
        return out


@pytest.mark.parametrize("n", [1, 2, 6])
def test_what_a_network_writes_into_its_trained_parameters_never_leaves(n: int) -> None:
    """An update is the trained model less the received one: rows that were made shorter would name the words of the examples."""
    torch.manual_seed(0)
    model = FlatModel(Words(0.5))
    x, y = torch.randint(6, (n, 3)), torch.randint(10, (n,))
    before = model.vector.clone()
    (seen,) = gradients(plan_of(0.1, 0.0, 1.0, 1), model, x, y)
    assert torch.equal(model.vector, before)
    alone = [gradients(plan_of(0.1, 0.0, 1.0, 1), model, x[i : i + 1], y[i : i + 1])[0] for i in range(n)]
    torch.testing.assert_close(seen, torch.stack(alone).sum(0), msg="each example sees the parameters as they were received")


def test_what_layers_draw_is_as_secret_as_the_noise() -> None:
    """An example that leaves its batch moves the masks of those behind it: to who knew them, all their gradients would move."""
    _, x, y = small()
    model = FlatModel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 10)))
    plan = plan_of(0.1, 0.0, 1.0, 2)
    state = torch.get_rng_state()
    runs = []
    for seeded in (True, True, False, False):
        torch.manual_seed(1)
        runs.append(torch.stack(gradients(plan, model, x, y, seeded=seeded)))
    torch.set_rng_state(state)
    assert torch.equal(runs[0], runs[1]), "a simulation is repeated"
    assert not torch.equal(runs[2], runs[3])
    assert not torch.equal(runs[0][0], runs[0][1]), "each step draws anew"
    gradients(plan, model, x, y)
    assert torch.equal(state, torch.get_rng_state())


WEIGHTED: dict[str, dict[str, object]] = {
    "classification": {"class_weights": [0.3, 6.0, 2.0]},
    "classification, small": {"class_weights": [0.3, 0.6, 0.1]},
    "binary": {"positive_weight": 9.0},
    "binary, small": {"positive_weight": 0.1},
    "multi-label": {"positive_weights": [5.0, 0.5, 1.0]},
    "segmentation": {"class_weights": [1.0, 8.0, 0.25], "dice": 0.5},
}


def drawn_for(task: Task, n: int) -> tuple[FlatModel, torch.Tensor, torch.Tensor]:
    """A network, examples and targets of that task."""
    torch.manual_seed(4)
    x = torch.randn(n, 5)
    if task.name == "segmentation":
        target = torch.randint(0, 3, (n, 2, 2))
        target[0, 0, 0] = IGNORED
        return FlatModel(nn.Sequential(nn.Linear(5, 12), nn.Unflatten(1, (3, 2, 2)))), x, target
    if task.name == "multi-label":
        return FlatModel(nn.Linear(5, 3)), x, torch.randint(0, 2, (n, 3)).float()
    classes = 2 if task.name == "binary" else 3
    return FlatModel(nn.Linear(5, 1 if classes == 2 else 3)), x, torch.arange(n) % classes


@pytest.mark.parametrize("clip", [1e-3, 0.3, 1e6])
@pytest.mark.parametrize("case", WEIGHTED)
def test_weights_stay_outside_of_the_clip(case: str, clip: float) -> None:
    """They were cut off: with a small clip, class 1 with weight 9 counted as much as class 0."""
    task = task_from({"name": case.partition(",")[0], **WEIGHTED[case]})
    model, x, y = drawn_for(task, 9)
    weights = task.example_weights(y)
    assert weights is not None
    assert 0 < float(weights.min()) < float(weights.max()) <= task.largest_weight * (1 + 1e-12)
    source = PerExampleGradient(
        plan_of(clip, 0.0, 1.0, 1), Randomness(5, True), (0, 0), partial(per_example_gradients, losses_of=task.losses), task
    )

    def contributed(some: torch.Tensor) -> torch.Tensor:
        local = Local(model, model.vector.clone(), LocalSpec(), source, torch.Generator())
        for batch in source.batches(local, x[some], y[some]):
            source(local, *batch)
        return model.grad.clone().double()

    total = torch.zeros(len(model.vector), dtype=torch.float64)
    for i in range(len(y)):
        (loss,) = task.losses(model.module(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(loss, list(model.module.parameters()))
        own = torch.cat([g.flatten() for g in found]).double() / weights[i]
        share = weights[i] / task.largest_weight
        right = share * own * (clip / own.norm()).clamp_max(1.0)
        alone = contributed(torch.tensor([i]))
        assert torch.allclose(alone, right, rtol=1e-5, atol=1e-7 * float(right.norm()))
        assert float(alone.norm()) <= clip * (1 + 1e-6)
        total += right
    assert torch.allclose(contributed(torch.arange(len(y))), total, rtol=1e-4, atol=1e-6 * float(total.norm()))


def test_weights_that_are_none_count_as_zero_and_none_above_the_clip() -> None:
    """Whatever a task of one's own says, no example contributes more than the clip."""

    class Lying(Binary):
        def example_weights(self, target: torch.Tensor) -> torch.Tensor:
            return torch.tensor([1e9, math.nan, -3.0, math.inf])[target]

    task, model = Lying(), FlatModel(nn.Linear(5, 1))
    source = PerExampleGradient(
        plan_of(0.5, 0.0, 1.0, 1), Randomness(5, True), (0, 0), partial(per_example_gradients, losses_of=task.losses), task
    )
    for kind, most in ((0, 0.5), (1, 0.0), (2, 0.0), (3, 0.5)):
        local = Local(model, model.vector.clone(), LocalSpec(), source, torch.Generator())
        for batch in source.batches(local, torch.ones(1, 5), torch.tensor([kind])):
            source(local, *batch)
        assert float(model.grad.norm()) <= most * (1 + 1e-6)
