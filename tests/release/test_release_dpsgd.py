"""DP-SGD inside a client: per-example gradients, clipping, noise, Poisson batches, accounting."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import pld_privacy_accountant
from scipy import stats
from torch.nn import functional as F

from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Adjacency, SampledGaussian
from fedveil.configuration.config import calibrated_setting, configure
from fedveil.models.model_registry import build
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.release.per_example import per_example_gradients, rows
from fedveil.release.plan import DpSgd
from fedveil.training.local import Local, LocalSpec, OptimizerSpec, Plain, train
from fedveil.training.params import FlatModel


def small(name: str = "mlp", shape: tuple[int, ...] = (1, 8, 8), n: int = 6) -> tuple[FlatModel, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return FlatModel(build(name, shape, 10, 1)), torch.randn(n, *shape, generator=g), torch.randint(0, 10, (n,), generator=g)


def local_with(plan: DpSgd, model: FlatModel, examples: int, step: int = 0) -> tuple[Local, PerExampleGradient]:
    source = PerExampleGradient(plan, Randomness(5, True), (0, 0))
    local = Local(model, model.vector.clone(), LocalSpec(), source, torch.Generator(), examples=examples, step=step)
    return local, source


def test_each_example_is_clipped_and_the_divisor_is_the_expected_batch() -> None:
    model, x, y = small()
    flat = rows(per_example_gradients(model.module, x, y)[0])
    clip = float(flat.norm(dim=1).median())
    local, source = local_with(DpSgd(clip, 0.0, 0.5, 1), model, examples=20)
    source(local, x, y)
    factors = (clip / flat.norm(dim=1)).clamp_max(1.0)
    torch.testing.assert_close(model.grad, (flat * factors[:, None]).sum(0) / (0.5 * 20), rtol=1e-4, atol=1e-6)
    assert 0 < int((factors < 1).sum()) < len(y)


def test_one_example_moves_the_gradient_by_at_most_the_clip() -> None:
    model, x, y = small()
    grads = []
    for keep in (slice(0, 6), slice(0, 5)):
        local, source = local_with(DpSgd(0.1, 0.0, 1.0, 1), model, examples=1)
        source(local, x[keep], y[keep])
        grads.append(model.grad.clone())
    assert 0.099 < float((grads[0] - grads[1]).norm()) <= 0.1


def test_step_noise_is_statistically_right_and_two_thirds_or_three_halves_fail() -> None:
    model, x, y = small()
    d = model.layout.dimension
    plan = DpSgd(0.3, 2.0, 1.0, 1)
    local, source = local_with(plan, model, examples=1)
    source(local, x[:0], y[:0])  # an empty Poisson batch still carries its noise
    square = float((model.grad.double() ** 2).sum())
    lo, hi = stats.chi2.ppf([1e-7, 1 - 1e-7], d)
    assert lo < square / 0.6**2 < hi
    for wrong in (2 / 3, 3 / 2):
        assert not lo < square / (0.6 * wrong) ** 2 < hi


def test_noise_is_fresh_in_every_step() -> None:
    model, x, y = small()
    seen = []
    for step in (0, 1):
        local, source = local_with(DpSgd(0.3, 1.0, 1.0, 2), model, examples=6, step=step)
        source(local, x, y)
        seen.append(model.grad.clone())
    assert abs(float(torch.corrcoef(torch.stack(seen))[0, 1])) < 0.2


def test_poisson_batches_have_the_planned_rate_and_number() -> None:
    model, x, y = small(n=6)
    x, y = x.repeat(50, 1, 1, 1), y.repeat(50)
    local, source = local_with(DpSgd(1.0, 1.0, 0.2, 40), model, examples=300)
    sizes = [len(by) for _, by in source.batches(local, x, y)]
    assert len(sizes) == 40
    assert len(set(sizes)) > 5
    # 40 draws of Bin(300, 0.2): mean 60, standard error 1.1
    assert abs(float(np.mean(sizes)) - 60) < 5.5


def test_training_without_noise_follows_the_clipped_sum() -> None:
    model, x, y = small()
    source = PerExampleGradient(DpSgd(1e6, 0.0, 1.0, 2), Randomness(1, True), (0, 0))
    spec = LocalSpec(steps=2, batch_size=6, optimizer=OptimizerSpec(lr=0.1))
    start = model.vector.clone()
    update, _ = train(Local(model, start, spec, source, torch.Generator()), x, y, Plain())
    other, _, _ = small()
    w = other.vector
    for _ in range(2):
        other.grad.zero_()
        F.cross_entropy(other.module(x), y).backward()  # type: ignore[no-untyped-call]
        w.sub_(other.grad, alpha=0.1)
    torch.testing.assert_close(update, w - start, rtol=1e-3, atol=1e-5)


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
