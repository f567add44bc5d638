"""DP-FedSAM (Shi et al. 2023): its two gradients by hand, what it keeps, its price, that it learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import method_kit as h
from by_hand import ONE, TWO, federation, gradient
from fedveil.accounting.types import View
from fedveil.executors.inline import Inline
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.methods.dp_fedsam import DPFedSAM, SharpnessAware
from fedveil.methods.fedavg import DPFedAvg
from fedveil.methods.method import Method
from fedveil.training.local import Local, Plain, train
from method_kit import planner

Vector = NDArray[np.float64]
LR, STEPS, NO_NOISE = 0.5, 4, 1e-9


def trained(method: Method, rounds: int = 3) -> Vector:
    """The model of clients ONE and TWO after some rounds of four steps of full batches, from a layer of small weights."""
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.3, -0.2], [0.1, 0.4]]))
        module.bias.copy_(torch.tensor([0.05, -0.6]))
    training = {"local_steps": STEPS, "optimizer": {"lr": LR}, "rounds": rounds}
    job = federation(method, [ONE, TWO], training=training, z=NO_NOISE, module=module)
    progress = start(job)
    assert fit(job, Inline(job.context), progress) == ""
    found: Vector = progress.model.numpy().astype(np.float64)
    return found


def by_hand(rho: float, adaptive: bool, rounds: int = 3) -> Vector:
    """Each step along the gradient at w + rho T^2 g / ||T g||, T the identity, or the weights as a diagonal."""
    w = np.array([0.3, -0.2, 0.1, 0.4, 0.05, -0.6])
    for _ in range(rounds):
        updates = []
        for part in (ONE, TWO):
            y = w.copy()
            for _ in range(STEPS):
                g = gradient(y, part)
                t = y if adaptive else np.ones(6)
                y = y - LR * gradient(y + rho * t**2 * g / np.linalg.norm(t * g), part)
            updates.append(y - w)
        w = w + np.mean(updates, axis=0)
    return w


@pytest.mark.parametrize("adaptive", [False, True])
def test_two_clients_by_hand(adaptive: bool) -> None:
    found = trained(DPFedSAM(clip=100.0, rho=0.7, adaptive=adaptive))
    assert found == pytest.approx(by_hand(0.7, adaptive), abs=2e-6)
    assert np.abs(found - by_hand(0.7, not adaptive)).max() > 1e-2
    assert np.abs(found - by_hand(0.0, adaptive)).max() > 1e-2


def test_without_the_way_uphill_it_is_dp_fedavg_to_the_bit() -> None:
    assert (trained(DPFedSAM(clip=0.3, rho=0.0)) == trained(DPFedAvg(clip=0.3))).all()


def of_one_client(objective: SharpnessAware | Plain, module: nn.Module, lr: float = 0.5) -> tuple[Local, torch.Tensor]:
    """One client's working set after three steps, and its update."""
    local = h.local_of(module, training={"local_steps": 3, "batch_size": 4, "optimizer": {"lr": lr}})
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(1)) * 3 + 1
    return local, train(local, x, torch.tensor([0, 1, 1, 0]), objective)[0]


def test_batch_statistics_follow_the_model_and_not_the_point_uphill() -> None:
    """At a rate of next to nothing the model stays where it is, so plain training has the same statistics."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    plain, _ = of_one_client(Plain(), module, lr=1e-60)
    statistics = plain.model.buffers()
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    sharp, update = of_one_client(SharpnessAware(rho=5.0), module, lr=1e-60)
    assert not update.any()
    assert sharp.model.buffers().equal(statistics)


def test_weights_of_zero_have_no_way_relative_to_them() -> None:
    """So a model that starts at zero is trained plainly at first, and divides nothing by zero."""
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    plain, sharp = (of_one_client(o, module)[1] for o in (Plain(), SharpnessAware(rho=0.5, adaptive=True)))
    assert plain.any()
    assert bool(torch.isfinite(sharp).all())


@pytest.mark.parametrize(("keep", "left"), [(1.0, 6), (0.5, 3), (1e-6, 1)])
def test_the_largest_coordinates_are_kept(keep: float, left: int) -> None:
    updates = []
    for share in (1.0, keep):
        torch.manual_seed(5)
        updates.append(of_one_client(SharpnessAware(rho=0.1, keep=share), nn.Linear(2, 2))[1])
    whole, update = updates
    kept = update != 0
    assert int(kept.sum()) == left
    assert update[kept].equal(whole[kept])
    assert not bool((whole[~kept].abs() > whole[kept].abs().min()).any())


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
def test_all_coordinates_leave_under_dp_fedavgs_plan(view: View) -> None:
    """Whatever is kept: a support would show the choice, and less noise the number."""
    s, state = h.setting(view), h.released([0.0] * 7)
    plans = [planner(m, s).plan(state, {}) for m in (DPFedSAM(clip=2.0, keep=0.1, adaptive=True), DPFedAvg(clip=2.0))]
    assert h.all_same([(plans[0], plans[1])])  # type: ignore[arg-type]
    assert [h.method_releases_mu(m, s) for m in (DPFedSAM(keep=0.1), DPFedAvg())] == [math.sqrt(20) / 2] * 2
