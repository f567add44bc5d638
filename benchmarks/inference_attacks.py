"""Inference attacks, measured on real images: clients, labels, attributes, extraction and a curious client's GAN.

    FEDVEIL_DATA=/path/to/data python benchmarks/inference_attacks.py [clients labels attribute extraction gan]

The attacked network is trained centrally for the number of epochs printed, and noise is added once to what is attacked: the
rows show how each attack measures, not what one method costs. Seed 0; one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.attacks import Bounds, CapturedUpload, Knowledge, gan
from fedveil.attacks.gan import (
    Fitting,
    class_scores,
    classifier_logits,
    features,
    fit,
    from_classifier,
    predictions,
    split_by_class,
)
from fedveil.attacks.labels import from_gradients, from_outputs, gradient_scores, identify
from fedveil.attacks.matching import gradient, prepared, split
from fedveil.attacks.metrics import save_comparison
from fedveil.attacks.model_attacks import CIFAR10_ANIMALS, KnowledgeExtraction, infer_attribute
from fedveil.data.load import load
from fedveil.models import model_registry as registry
from harness import run_parts

SIGMAS = (0.0, 0.01, 0.1, 1.0)


def data(name: str, train: int, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first images of both splits, from -1 to 1, with labels."""
    loaded = load(name, download=False)
    x = [torch.from_numpy(v).float() / 127.5 - 1 for v in (loaded.x_train[:train], loaded.x_test[:test])]
    return x[0], torch.from_numpy(loaded.y_train[:train]), x[1], torch.from_numpy(loaded.y_test[:test])


def seeded(seed: int) -> torch.Generator:
    """A generator."""
    return torch.Generator().manual_seed(seed)


def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right predictions."""
    return float((predictions(module, x).argmax(1) == y).double().mean())


def uploads(module: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], sigma: float) -> list[CapturedUpload]:
    """One noisy gradient per batch."""
    clean = prepared(lambda: module, module.state_dict(), "eval", None)
    sent = []
    for seed, (x, y) in enumerate(batches):
        flat = gradient(clean, x, y).detach()
        noisy = flat + sigma * torch.randn(flat.shape, generator=seeded(seed))
        sent.append(CapturedUpload(split(noisy, dict(clean.named_parameters())), n_examples=len(x)))
    return sent


def noised(module: nn.Module, shape: tuple[int, ...], sigma: float) -> nn.Module:
    """A copy of a lenet5 with Gaussian noise on every parameter."""
    copy = registry.build("lenet5", shape, 10, 0)
    rng = seeded(99)
    copy.load_state_dict({k: v + sigma * torch.randn(v.shape, generator=rng) for k, v in module.state_dict().items()})
    return copy


def part_clients() -> None:
    """Find 10 of 100 clients (50 CIFAR-10 images of mostly two classes each) by the gradient on 10 probes."""
    x, y, *_ = data("cifar10", 20000, 10)
    order = [(y == c).nonzero().flatten() for c in range(10)]
    clients = []
    for i in range(100):
        first, second = order[i % 10][25 * (i // 10) :][:25], order[(i + 1 + i // 10) % 10][300 + 25 * (i // 10) :][:25]
        chosen = torch.cat([first, second])
        clients.append((x[chosen], y[chosen]))
    module = registry.build("lenet5", (3, 32, 32), 10, 0)
    for epochs in (0, 3):
        if epochs:
            fit(module, x[10000:], y[10000:], seeded(0), Fitting(epochs))
        for sigma in SIGMAS:
            probes = [(cx[20:30], cy[20:30]) for cx, cy in clients[:10]]
            state = module.state_dict()
            scores = gradient_scores(uploads(module, clients, sigma), probes, lambda: module, state, Knowledge())
            found = identify(scores, range(10), "gradient")
            print(
                f"clients, {epochs} epochs, sigma {sigma:g}: matched {found.matched:.0%} (chance {found.chance_matched:.0%}), "
                f"top {found.flagged}: {found.top:.0%} (chance {found.chance_top:.0%}), TPR at 1% FPR {found.tpr:.0%}",
                flush=True,
            )


def part_labels() -> None:
    """Labels of 500 single CIFAR-10 images by both rules, before and after training."""
    x, y, tx, ty = data("cifar10", 10000, 500)
    module = registry.build("lenet5", (3, 32, 32), 10, 0)
    for epochs in (0, 1, 4):
        if epochs:
            fit(module, x, y, seeded(epochs), Fitting(epochs))
        for sigma in SIGMAS[:3]:
            sent = uploads(module, [(tx[i : i + 1], ty[i : i + 1]) for i in range(500)], sigma)
            rule = from_gradients(sent, ty, lambda: module, module.state_dict(), Knowledge())
            noisy = noised(module, (3, 32, 32), sigma)
            output = from_outputs(tx, ty, lambda net=noisy: net, noisy.state_dict())  # type: ignore[misc]
            print(
                f"labels, +{epochs} epochs, sigma {sigma:g}: gradient rule {rule.accuracy:.1%}, "
                f"output rule {output.accuracy:.1%}, constant guess {rule.constant_guess:.1%}",
                flush=True,
            )


def part_attribute() -> None:
    """Attribute "animal or not" from penultimate features: 2,000 auxiliary images, 1,000 attacked ones."""
    x, y, tx, ty = data("cifar10", 12000, 3000)
    animal = torch.isin(ty, torch.tensor(CIFAR10_ANIMALS))
    module = registry.build("lenet5", (3, 32, 32), 10, 0)
    for epochs in (0, 5):
        if epochs:
            fit(module, x, y, seeded(0), Fitting(epochs))
        for sigma in SIGMAS[:3]:
            found = features(noised(module, (3, 32, 32), sigma), tx)
            result = infer_attribute(found[:2000], animal[:2000], found[2000:], animal[2000:])
            print(
                f"attribute, {epochs} epochs, sigma {sigma:g}: balanced accuracy {result.balanced_accuracy:.1%}, "
                f"AUC {result.auc:.3f}, accuracy {result.accuracy:.1%} against the constant guess {result.constant_guess:.1%}",
                flush=True,
            )


def part_extraction() -> None:
    """A student of a noised victim; 5,000 queries."""
    x, y, tx, ty = data("mnist", 15000, 2000)
    victim = registry.build("lenet5", (1, 28, 28), 10, 0)
    fit(victim, x[:10000], y[:10000], seeded(0), Fitting(3))
    for sigma in (0.0, 0.01, 0.05, 0.1):
        noisy = noised(victim, (1, 28, 28), sigma)
        config = KnowledgeExtraction(epochs=15)
        _, scores = config.run(noisy, lambda: registry.build("lenet5", (1, 28, 28), 10, 1), x[10000:], (tx, ty), seeded(1))
        print(f"extraction, sigma {sigma:g}: {scores}", flush=True)


def part_gan() -> None:
    """8x8 digits without the digit 5 at the attacker; 4 observed models of growing training, 60 steps each."""
    x, y, tx, ty = data("digits", 1437, 360)
    shape, private = (1, 8, 8), 5
    bounds = Bounds(shape, -1.0, 1.0)
    judge = registry.build("cnn2", shape, 10, 7)
    fit(judge, x[700:], y[700:], seeded(7), Fitting(15))
    extractor, logits = from_classifier("digits-cnn2", judge, bounds.inputs), classifier_logits(judge, bounds.inputs)
    mine = y[:700] != private
    own = x[:700][mine], y[:700][mine]

    def model() -> nn.Module:
        return registry.build("cnn2", shape, 10, 0)

    real_x, real_y = torch.cat([tx, x[700:]]), torch.cat([ty, y[700:]])
    rows = []
    for train_head in (False, True):
        config = gan.CuriousClient(private=(private,), steps=60, lr=1e-3, train_class_head=train_head)
        attacker, module = gan.start(config, model, 10, bounds, seeded(0)), model()
        for i in range(4):
            fit(module, x[:700], y[:700], seeded(i), Fitting(4))
            gan.observe(attacker, config, model, module.state_dict(), own, seeded(100 + i))
        print(
            f"judge {accuracy(judge, tx, ty):.1%}, attacked model {accuracy(module, tx, ty):.1%}, class head learns: {train_head}"
        )
        for label in (private, 3, 0):
            real, others = split_by_class(bounds.images(real_x), real_y, label)
            made = gan.generate(attacker, label, 400, seeded(1))
            print(f"class {label}: {class_scores(made, real, others[::10], label, extractor, logits)}", flush=True)
            rows.append((f"class {label}", made[:8]))
    print(save_gan(private, real_x, real_y, bounds, rows))


def save_gan(label: int, x: Tensor, y: Tensor, bounds: Bounds, rows: Sequence[tuple[str, Tensor]]) -> Path:
    """runs/gan-<label>.png: real images of a class above generated ones."""
    Path("runs").mkdir(exist_ok=True)
    return save_comparison(f"runs/gan-{label}.png", split_by_class(bounds.images(x), y, label)[0][:8], rows)


PARTS = {
    "clients": part_clients,
    "labels": part_labels,
    "attribute": part_attribute,
    "extraction": part_extraction,
    "gan": part_gan,
}


if __name__ == "__main__":
    run_parts(__doc__, PARTS)
