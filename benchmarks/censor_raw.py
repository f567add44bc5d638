"""How often CENSOR sends the raw gradient, and how near to it what it sends otherwise is.

    FEDVEIL_DATA=/path/to/data python benchmarks/censor_raw.py

One image a gradient, 100 test images of Fashion-MNIST, 20 candidates each; LeNet-5 untrained, and after FedAvg with 10 of 20
clients a round, 20 local steps of 32 images at rate 0.1. Printed: the share of gradients that are sent raw; of the others the
median over images and layers of |cos(sent, gradient)|; the median loss.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from fedveil.attacks.snapshot import Snapshot, snapshot_of
from fedveil.experiment.config import parse
from fedveil.experiment.resolve import opened
from fedveil.papers.fedanc.baselines import Orthogonal
from fedveil.tasks.classification import Classification
from fedveil.training.local import BatchGradient, Local, LocalSpec
from fedveil.training.params import FlatModel

IMAGES = 100
ROUNDS = (0, 3, 10)


def snapshot(round: int) -> Snapshot:
    """FedAvg before that round."""
    optimizer = {"name": "sgd", "lr": 0.1}
    training = {"rounds": 10, "clients_per_round": 10, "local_steps": 20, "batch_size": 32, "optimizer": optimizer}
    partition = {"kind": "iid", "clients": 20}
    raw = {
        "data": {"name": "fashion-mnist", "data_dir": os.environ.get("FEDVEIL_DATA"), "partition": partition},
        "model": {"name": "lenet5"},
        "method": {"name": "fedavg"},
        "training": {**training, "sampling": "fixed"},
        "privacy": {"view": "server"},
        "run": {"engine": "inline"},
    }
    return snapshot_of(*opened(parse(raw)), round=round)


def measured(place: Snapshot, rule: Orthogonal) -> tuple[float, float, float]:
    """Share of raw gradients, median |cos| of the others, median loss."""
    model, (x, y) = FlatModel(place.make_model()), place.federation.test
    rng = torch.Generator().manual_seed(0)
    raw, cosines, losses = 0, list[float](), list[float]()
    for i in range(IMAGES):
        local = Local(model, place.progress.model.clone(), LocalSpec(), BatchGradient(), rng)
        local.normal = lambda n: torch.randn(n, generator=rng)
        model.load(local.start)
        losses.append(float(local.gradient(local, x[i : i + 1], y[i : i + 1])))
        gradient = model.grad.clone()
        rule.replace(local, x[i : i + 1], y[i : i + 1])
        if torch.equal(gradient, model.grad):
            raw += 1
            continue
        pairs = zip(model.layout.split(model.grad), model.layout.split(gradient), strict=True)
        cosines += [abs(float(torch.cosine_similarity(o, g, dim=0))) for o, g in pairs]
    return raw / IMAGES, float(np.median(cosines or [np.nan])), float(np.median(losses))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for round in ROUNDS:
        place = snapshot(round)
        for form in ("repo", "paper"):
            rule = Orthogonal(form=form, trials=20, rounds=1, task=Classification())  # type: ignore[arg-type]
            share, cosine, loss = measured(place, rule)
            print(f"round {round}, {form}: raw {share:.0%}, |cos| {cosine:.3f}, loss {loss:.3g}", flush=True)
