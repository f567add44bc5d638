"""DP-FedProx: DP-FedAvg with the proximal term of Li et al. (2020) in local training."""

from __future__ import annotations

import numpy as np
import pytest

from by_hand import ONE, TWO, federation, gradient
from fedveil.accounting.types import View
from fedveil.executors.inline import Inline
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.methods.fedavg import DPFedAvg
from fedveil.training.local import Plain

LR, STEPS, ROUNDS = 0.5, 3, 4


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_two_clients_by_hand(alpha: float) -> None:
    method, steps = DPFedAvg(clip=100.0, proximal=alpha), {"local_steps": STEPS, "optimizer": {"lr": LR}, "rounds": ROUNDS}
    job = federation(method, [ONE, TWO], view=View.SERVER, training=steps, z=1e-9)
    progress = start(job)
    assert fit(job, Inline(job.context), progress) == ""
    w = np.zeros(6)
    for _ in range(ROUNDS):
        trained = []
        for part in (ONE, TWO):
            y = w.copy()
            for _ in range(STEPS):
                y -= LR * (gradient(y, part) + alpha * (y - w))
            trained.append(y)
        w = np.mean(trained, axis=0)
    assert progress.model.numpy() == pytest.approx(w, abs=2e-6)


def test_the_guarantee_does_not_depend_on_it() -> None:
    job = federation(DPFedAvg(), [ONE, TWO], view=View.SERVER, training={"rounds": 2}, z=1.0)
    priced = [DPFedAvg(proximal=alpha).releases(job.setting, View.SERVER) for alpha in (0.0, 5.0)]
    assert priced[0] == priced[1]
    assert DPFedAvg().client(job.setting) == Plain()
