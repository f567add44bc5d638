"""Reconstruction attacks, measured: quality on real images and steps per second.

    FEDVEIL_DATA=/path/to/data python benchmarks/attacks.py [part ...]

Parts: dlg, ig, noise, adaptive, labels, local, gradinversion, networks, speed, picture (default: all). One thread; image i has
seed i. Images are the first of the test split of MNIST and CIFAR-10: standardised for the ReLU networks, in [0, 1] for the
sigmoid LeNet; scores are always of images in [0, 1].
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.attacks import (
    DLG,
    IDLG,
    IG,
    Bounds,
    CapturedUpload,
    GradientMatching,
    GradInversion,
    Knowledge,
    KnownTraining,
    metrics,
)
from fedveil.attacks.labels import label_counts, mean_prediction
from fedveil.attacks.matching import gradient, prepared, simulation, split, withheld_guess
from fedveil.attacks.metrics import save_comparison
from fedveil.data.load import load
from fedveil.models import model_registry as registry

LIMITS = {"mnist": 10, "cifar10": 10}


def images(name: str, n: int, train: bool = False) -> tuple[Tensor, Tensor]:
    """The first n images in [0, 1], and labels."""
    data = load(name, download=False)
    x, y = (data.x_train, data.y_train) if train else (data.x_test, data.y_test)
    return torch.from_numpy(x[:n]).float() / 255, torch.from_numpy(y[:n])


def sigmoid_lenet(shape: tuple[int, ...], seed: int = 0) -> nn.Module:
    """The LeNet of Zhu et al. with weights and biases from U(-0.5, 0.5)."""
    module = registry.build("lenet-dlg", shape, 10, seed)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=rng)
    return module


def relu_cnn(shape: tuple[int, ...], seed: int = 0) -> nn.Module:
    """5x5 convolutions (16 channels; 32 of stride 2) and one linear layer, ReLU; 96k parameters on 3x32x32."""
    channels, side = shape[0], shape[1] // 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(channels, 16, 5, 1, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(32 * side * side, 10))


def bounds_of(shape: tuple[int, ...]) -> Bounds:
    """Images standardised with the usual constants of MNIST (1 channel) or CIFAR-10 (3 channels)."""
    means, stds = ((0.1307,), (0.3081,)) if shape[0] == 1 else ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    low = tuple(-m / s for m, s in zip(means, stds, strict=True))
    return Bounds(shape, low, tuple((1 - m) / s for m, s in zip(means, stds, strict=True)))


def upload(module: nn.Module, x: Tensor, y: Tensor, std: dict[str, float], seed: int) -> CapturedUpload:
    """One gradient with Gaussian noise of the given standard deviation per parameter."""
    clean = prepared(lambda: module, module.state_dict(), "eval", None)
    flat = gradient(clean, x, y).detach()
    named = split(flat, dict(clean.named_parameters()))
    rng = torch.Generator().manual_seed(10_000 + seed)
    noisy = {k: v + std.get(k, 0.0) * torch.randn(v.shape, generator=rng) for k, v in named.items()}
    return CapturedUpload(noisy, n_examples=len(x), noise_std={k: std.get(k, 0.0) for k in named}, signal_norm=float(flat.norm()))


def attack_all(
    label: str,
    config: GradientMatching,
    module: nn.Module,
    data: tuple[Tensor, Tensor],
    std: dict[str, float] | None = None,
    knowledge: Callable[[CapturedUpload], Knowledge] = lambda _: Knowledge(n=1),
    raw: bool = False,
) -> list[float]:
    """Attack images one by one and print one line; `raw` leaves the inputs in [0, 1]."""
    x, y = data
    shape = tuple(x.shape[1:])
    bounds = Bounds(shape) if raw else bounds_of(shape)
    psnrs, ssims, seconds, steps, closures, hits, ratios = [], [], 0.0, 0, 0, 0, []
    for i in range(len(x)):
        sent = upload(module, bounds.inputs(x[i : i + 1]), y[i : i + 1], std or {}, i)
        rng = torch.Generator().manual_seed(i)
        result = config.run([sent], lambda: module, module.state_dict(), knowledge(sent), bounds, rng)
        psnrs += metrics.psnr(result.images, x[i : i + 1]).tolist()
        ssims += metrics.ssim(result.images, x[i : i + 1]).tolist()
        seconds, steps, closures = seconds + result.seconds, steps + result.steps, closures + result.closures
        hits += int(result.y[0] == y[i])
        ratios.append(sent.noise_ratio or 0.0)
    print(
        f"{label:52s} n={len(x):3d}  PSNR median {np.median(psnrs):6.1f} mean {np.mean(psnrs):6.1f} min {min(psnrs):6.1f} dB"
        f"  SSIM {np.median(ssims):.3f}  success {np.mean(np.array(psnrs) >= 20):.2f}  label {hits / len(x):.2f}"
        f"  r {np.mean(ratios):7.3g}  {steps / seconds:5.0f} steps/s {closures / seconds:5.0f} closures/s"
        f"  {seconds / len(x):5.1f} s/image",
        flush=True,
    )
    return psnrs


def floors(name: str) -> None:
    """The scores of an attacker who saw no upload."""
    truth, _ = images(name, LIMITS[name])
    reference, _ = images(name, 1000, train=True)
    for floor, scores in metrics.floors(truth, reference).items():
        print(f"{name} floor, {floor:40s} PSNR median {np.median(scores.psnr):6.1f} dB  SSIM {np.median(scores.ssim):.3f}")


def part_dlg() -> None:
    """DLG and iDLG on the sigmoid LeNet; the published optimizer beside strong Wolfe."""
    data = images("mnist", LIMITS["mnist"])
    module = sigmoid_lenet((1, 28, 28))
    floors("mnist")
    attack_all("DLG, sigmoid LeNet, MNIST", DLG(), module, data, raw=True)
    attack_all("iDLG, sigmoid LeNet, MNIST", IDLG(), module, data, raw=True)
    attack_all("DLG, no line search (as published)", DLG(line_search=None), module, data, raw=True)
    attack_all(
        "DLG, sigmoid LeNet, CIFAR-10 (2 starts x 100)", DLG(100, 2), sigmoid_lenet((3, 32, 32)), images("cifar10", 5), raw=True
    )


def part_ig() -> None:
    """IG on the ReLU CNN without noise."""
    floors("cifar10")
    for name, shape in (("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))):
        attack_all(f"IG 500, ReLU CNN, {name}", IG(500), relu_cnn(shape), images(name, LIMITS[name]))
        attack_all(f"IG 500 tv=1e-4, ReLU CNN, {name}", IG(500, tv=1e-4), relu_cnn(shape), images(name, LIMITS[name]))


def part_networks() -> None:
    """IG on other networks: max-pooling and sigmoid make it harder."""
    data = images("mnist", 5)
    for label, name, options in (
        ("lenet-dlg with ReLU", "lenet-dlg", {"activation": "relu"}),
        ("cnn2 (max-pooling)", "cnn2", {"channels": (8, 16), "hidden": 64}),
        ("cnn2 with average pooling", "cnn2", {"channels": (8, 16), "hidden": 64, "pool": "avg"}),
        ("lenet5 (max-pooling)", "lenet5", {}),
    ):
        attack_all(f"IG 1000, 2 starts, {label}, MNIST", IG(1000, 2), registry.build(name, (1, 28, 28), 10, 0, **options), data)
    attack_all("IG 1500, sigmoid LeNet, MNIST", IG(1500), sigmoid_lenet((1, 28, 28)), data, raw=True)
    attack_all("DLG, ReLU CNN, MNIST (the wrong attack)", DLG(100, 2), relu_cnn((1, 28, 28)), data)


def part_noise() -> None:
    """Quality against noise on every coordinate."""
    for name, shape in (("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))):
        module = relu_cnn(shape)
        for sigma in (1e-4, 1e-3, 1e-2, 1e-1):
            std = {k: sigma for k, _ in module.named_parameters()}
            attack_all(f"IG 500, ReLU CNN, {name}, sigma {sigma:g}", IG(500), module, images(name, 5), std)
    module = sigmoid_lenet((1, 28, 28))
    for sigma in (1e-3, 1e-2, 1e-1):
        std = {k: sigma for k, _ in module.named_parameters()}
        attack_all(f"DLG 100, 2 starts, sigmoid LeNet, sigma {sigma:g}", DLG(100, 2), module, images("mnist", 5), std, raw=True)


def part_adaptive() -> None:
    """Noise everywhere but on one layer (r is printed); the attacker is told, or not."""
    for name, shape in (("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))):
        module = relu_cnn(shape)
        names = [k for k, _ in module.named_parameters()]
        for clean, what, sigma in (("5.", "linear layer", 2.0), ("0.", "first convolution", 0.1)):
            std = dict.fromkeys((k for k in names if not k.startswith(clean)), sigma)
            data = images(name, LIMITS[name])
            attack_all(f"IG 500 naive, {name}, {what} left clean", IG(500), module, data, std)
            attack_all(f"IG 500 adaptive, {name}, {what} left clean", IG(500), module, data, std, _knows_noise)
        _top_noised(name, module)


def _knows_noise(sent: CapturedUpload) -> Knowledge:
    return Knowledge(n=1, noise_std=sent.noise_std)


def _top_noised(name: str, module: nn.Module) -> None:
    truth, y = images(name, 5)
    bounds = bounds_of(tuple(truth.shape[1:]))
    x = bounds.inputs(truth)
    for label, informed in (("naive", False), ("drops the largest 10 % received", True)):
        scores = []
        for i in range(len(x)):
            clean = upload(module, x[i : i + 1], y[i : i + 1], {}, i).tensors
            keep = withheld_guess(CapturedUpload(clean), 0.1)
            rng = torch.Generator().manual_seed(20_000 + i)
            noisy = {k: v + 0.1 * torch.randn(v.shape, generator=rng) * ~keep[k] for k, v in clean.items()}
            knowledge = Knowledge(n=1, labels=y[i : i + 1], mask=withheld_guess(CapturedUpload(noisy), 0.1) if informed else None)
            rng = torch.Generator().manual_seed(i)
            found = IG(500).run([CapturedUpload(noisy)], lambda: module, module.state_dict(), knowledge, bounds, rng)
            scores += metrics.psnr(found.images, truth[i : i + 1]).tolist()
        print(f"IG 500, {name}, noise on the top 10 % only, {label:34s} PSNR median {np.median(scores):6.1f} dB", flush=True)


def part_labels() -> None:
    """Label counts of a batch of 32 on an untrained network: share of trials with all classes right."""
    truth, y = images("mnist", 6000, train=True)
    x = bounds_of((1, 28, 28)).inputs(truth)
    auxiliary = x[5000:6000]
    for sigma in (0.0, 0.01, 0.1):
        right = classes = 0.0
        for seed in range(10):
            module = relu_cnn((1, 28, 28), seed)
            chosen = torch.randperm(5000, generator=torch.Generator().manual_seed(seed))[:32]
            std = {k: sigma for k, _ in module.named_parameters()}
            sent = upload(module, x[chosen], y[chosen], std, seed)
            counts = label_counts(sent.tensors["5.bias"], mean_prediction(module, auxiliary), 32)
            truth = y[chosen].bincount(minlength=10)
            right += float(torch.equal(counts, truth)) / 10
            classes += float(torch.minimum(counts, truth).sum()) / 320
        line = f"label counts, batch 32, untrained, sigma {sigma:g}: all classes right in {right:.0%} of 10 trials"
        print(f"{line}, {classes:.1%} of labels", flush=True)


def part_local() -> None:
    """Several local steps: one step assumed against the steps unrolled."""
    truth, y = images("mnist", 4)
    module = relu_cnn((1, 28, 28))
    bounds = bounds_of((1, 28, 28))
    x = bounds.inputs(truth)
    for steps, lr in ((5, 0.003), (5, 0.01), (5, 0.1)):
        spec = KnownTraining(steps=steps, lr=lr)
        for label, local in (("one step assumed", KnownTraining(1, lr * steps)), ("unrolled", spec)):
            scores, speeds = [], []
            for i in range(4):
                here = prepared(lambda: module, module.state_dict(), "eval", None)
                moved = -lr * steps * simulation(here, spec)(x[i : i + 1], y[i : i + 1]).detach()
                sent = CapturedUpload(split(moved, dict(here.named_parameters())), kind="delta", local=spec)
                rng = torch.Generator().manual_seed(i)
                found = IG(500).run([sent], lambda: module, module.state_dict(), Knowledge(n=1, local=local), bounds, rng)
                scores += metrics.psnr(found.images, truth[i : i + 1]).tolist()
                speeds.append(found.steps_per_second)
            print(
                f"IG 500, MNIST, {steps} local steps at {lr}, {label:18s} PSNR median {np.median(scores):6.1f} dB"
                f"  {np.mean(speeds):.0f} steps/s",
                flush=True,
            )


def part_gradinversion() -> None:
    """GradInversion on single images and on a batch."""
    for name, shape in (("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))):
        attack_all(f"GradInversion 500, 2 joint starts, {name}", GradInversion(500, 2), relu_cnn(shape), images(name, 5))
    truth, y = images("cifar10", 4)
    module, bounds = relu_cnn((3, 32, 32)), bounds_of((3, 32, 32))
    sent = upload(module, bounds.inputs(truth), y, {}, 0)
    for label, config in (("IG 1000", IG(1000)), ("GradInversion 500, 2 joint starts", GradInversion(500, 2))):
        rng = torch.Generator().manual_seed(0)
        found = config.run([sent], lambda: module, module.state_dict(), Knowledge(n=4, labels=y), bounds, rng)
        scores = metrics.psnr(metrics.matched(found.images, truth), truth)
        line = f"{label}, batch of 4, CIFAR-10: PSNR median {float(scores.median()):.1f} dB"
        print(f"{line}, {found.steps_per_second:.0f} steps/s", flush=True)


def part_speed() -> None:
    """Steps per second, and the time of a step over that of the bare passes it cannot do without, taken in turns.

    Bare: forward, gradient with its graph, distance, gradient by the image. Medians of 9 turns, so that other work on the
    machine slows both sides alike.
    """
    for name, shape in (("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))):
        _speed(f"IG, ReLU CNN, {name}", IG(60), relu_cnn(shape), images(name, 1), bounds_of(shape))
    _speed("DLG, sigmoid LeNet, mnist", DLG(5, 1), sigmoid_lenet((1, 28, 28)), images("mnist", 1), Bounds((1, 28, 28)))


def _speed(label: str, config: GradientMatching, module: nn.Module, data: tuple[Tensor, Tensor], bounds: Bounds) -> None:
    x, y = bounds.inputs(data[0]), data[1]
    sent, state = upload(module, x, y, {}, 0), module.state_dict()
    bare = prepared(lambda: module, state, "eval", None)
    target = torch.cat([t.flatten() for t in sent.tensors.values()])
    ratios, speeds = [], []
    for turn in range(9):
        result = config.run([sent], lambda: module, state, Knowledge(labels=y), bounds, torch.Generator().manual_seed(turn))
        passes = result.closures
        guess = torch.randn(x.shape, generator=torch.Generator().manual_seed(turn)).requires_grad_(True)
        began = time.perf_counter()
        for _ in range(passes):
            torch.autograd.grad((gradient(bare, guess, y, create_graph=True) - target).square().sum(), guess)
        ratios.append(result.seconds / (time.perf_counter() - began))
        speeds.append(passes / result.seconds)
    spread = f"{min(speeds):.0f} to {max(speeds):.0f}"
    print(f"{label}: {np.median(speeds):.0f} passes/s ({spread}), {np.median(ratios):.2f} times the bare passes", flush=True)


def part_picture() -> None:
    """docs/attacks.png: six CIFAR-10 images and what IG makes of their gradients."""
    truth, y = images("cifar10", 6)
    module, bounds = relu_cnn((3, 32, 32)), bounds_of((3, 32, 32))
    names = [k for k, _ in module.named_parameters()]
    only_convolutions = {k: 2.0 for k in names if not k.startswith("5.")}
    cases: list[tuple[str, dict[str, float], Callable[[CapturedUpload], Knowledge]]] = [
        ("no noise", {}, lambda _: Knowledge(n=1)),
        ("sigma 0.01", dict.fromkeys(names, 0.01), lambda _: Knowledge(n=1)),
        ("sigma 0.1", dict.fromkeys(names, 0.1), lambda _: Knowledge(n=1)),
        ("all but last\nlayer: naive", only_convolutions, lambda _: Knowledge(n=1)),
        ("all but last\nlayer: adaptive", only_convolutions, _knows_noise),
    ]
    rows = []
    for label, std, knowledge in cases:
        found = []
        for i in range(len(truth)):
            sent = upload(module, bounds.inputs(truth[i : i + 1]), y[i : i + 1], std, i)
            rng = torch.Generator().manual_seed(i)
            found.append(IG(500).run([sent], lambda: module, module.state_dict(), knowledge(sent), bounds, rng).images)
        rows.append((label, torch.cat(found)))
    path = Path(__file__).parent.parent / "docs" / "attacks.png"
    print(save_comparison(path, truth, rows, "Inverting Gradients, CIFAR-10, one example per upload"))


PARTS = {
    "dlg": part_dlg,
    "ig": part_ig,
    "noise": part_noise,
    "adaptive": part_adaptive,
    "labels": part_labels,
    "local": part_local,
    "gradinversion": part_gradinversion,
    "networks": part_networks,
    "speed": part_speed,
    "picture": part_picture,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure (default: all)")
    chosen = parser.parse_args(arguments).parts or list(PARTS)
    torch.set_num_threads(1)
    for part in chosen:
        print(f"--- {part}")
        PARTS[part]()


if __name__ == "__main__":
    main()
