"""Reconstruction attacks, measured: quality on real images and steps per second.

    FEDVEIL_DATA=/path/to/data python benchmarks/attacks.py [part ...]

Parts: dlg, ig, noise, adaptive, labels, local, gradinversion, networks, speed, picture (default: all). One thread; image i has
seed i. Images are the first of the test split of MNIST and CIFAR-10: standardised for the ReLU networks, in [0, 1] for the
sigmoid LeNet; scores are always of images in [0, 1].
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from harness import ROOT, run_parts

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
Network = Callable[[tuple[int, ...]], nn.Module]


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


@dataclass(frozen=True)
class Case:
    """Single images that are attacked one by one, and one line of scores.

    Args:
        label: with `{data}` for the data set. attack: its settings. network: by the shape of an image. n: images.
        noise: std of the parameters whose name does not start with `clean`. told: the attacker knows the noise.
        raw: inputs in [0, 1], not standardised.
    """

    label: str
    attack: GradientMatching
    network: Network
    data: str = "mnist"
    n: int = 10
    noise: float = 0.0
    clean: str = "nothing"
    told: bool = False
    raw: bool = False

    def attacked(self, i: int, module: nn.Module, x: Tensor, y: Tensor) -> tuple[CapturedUpload, Any]:
        """The upload of one image, and what the attack finds."""
        std = {k: self.noise for k, _ in module.named_parameters() if self.noise and not k.startswith(self.clean)}
        bounds = Bounds(tuple(x.shape[1:])) if self.raw else bounds_of(tuple(x.shape[1:]))
        sent = upload(module, bounds.inputs(x), y, std, i)
        return sent, found(self.attack, sent, module, Knowledge(n=1, noise_std=sent.noise_std if self.told else None), bounds, i)

    def __call__(self) -> None:
        """Attack and print."""
        (x, y), module = images(self.data, self.n), self.network(SHAPES[self.data])
        each = [self.attacked(i, module, x[i : i + 1], y[i : i + 1]) for i in range(self.n)]
        made, results = torch.cat([result.images for _, result in each]), [result for _, result in each]
        psnrs, ssims = metrics.psnr(made, x).numpy(), metrics.ssim(made, x).numpy()
        seconds, hits = sum(r.seconds for r in results), sum(int(r.y[0] == y[i]) for i, r in enumerate(results))
        speeds = (sum(r.steps for r in results) / seconds, sum(r.closures for r in results) / seconds)
        print(
            f"{self.label.format(data=self.data):52s} n={self.n:3d}  PSNR median {np.median(psnrs):6.1f} mean {psnrs.mean():6.1f}"
            f" min {psnrs.min():6.1f} dB  SSIM {np.median(ssims):.3f}  success {np.mean(psnrs >= 20):.2f}"
            f"  label {hits / self.n:.2f}  r {np.mean([sent.noise_ratio or 0.0 for sent, _ in each]):7.3g}"
            f"  {speeds[0]:5.0f} steps/s {speeds[1]:5.0f} closures/s  {seconds / self.n:5.1f} s/image",
            flush=True,
        )


def found(attack: GradientMatching, sent: CapturedUpload, module: nn.Module, knows: Knowledge, bounds: Bounds, seed: int) -> Any:
    """What an attack on one upload finds."""
    return attack.run([sent], lambda: module, module.state_dict(), knows, bounds, torch.Generator().manual_seed(seed))


def floors(name: str) -> None:
    """The scores of an attacker who saw no upload."""
    truth, reference = images(name, 10)[0], images(name, 1000, train=True)[0]
    for floor, scores in metrics.floors(truth, reference).items():
        print(f"{name} floor, {floor:40s} PSNR median {np.median(scores.psnr):6.1f} dB  SSIM {np.median(scores.ssim):.3f}")


def named(name: str, **options: Any) -> Network:
    """A network of the registry."""
    return lambda shape: registry.build(name, shape, 10, 0, **options)


NARROW = {"channels": (8, 16), "hidden": 64}
DIGIT = partial(Case, network=sigmoid_lenet, raw=True)
BOTH = tuple(SHAPES)
CASES: dict[str, list[Callable[[], None]]] = {
    "dlg": [
        partial(floors, "mnist"),
        DIGIT("DLG, sigmoid LeNet, MNIST", DLG()),
        DIGIT("iDLG, sigmoid LeNet, MNIST", IDLG()),
        DIGIT("DLG, no line search (as published)", DLG(line_search=None)),
        DIGIT("DLG, sigmoid LeNet, CIFAR-10 (2 starts x 100)", DLG(100, 2), data="cifar10", n=5),
    ],
    "ig": [
        partial(floors, "cifar10"),
        *(
            Case(f"IG 500{label}, ReLU CNN, {{data}}", attack, relu_cnn, data)
            for data in BOTH
            for label, attack in (("", IG(500)), (" tv=1e-4", IG(500, tv=1e-4)))
        ),
    ],
    "noise": [
        *(
            Case(f"IG 500, ReLU CNN, {{data}}, sigma {sigma:g}", IG(500), relu_cnn, data, 5, sigma)
            for data in BOTH
            for sigma in (1e-4, 1e-3, 1e-2, 1e-1)
        ),
        *(DIGIT(f"DLG 100, 2 starts, sigmoid LeNet, sigma {s:g}", DLG(100, 2), n=5, noise=s) for s in (1e-3, 1e-2, 1e-1)),
    ],
    "networks": [
        *(
            Case(f"IG 1000, 2 starts, {label}, MNIST", IG(1000, 2), network, n=5)
            for label, network in (
                ("lenet-dlg with ReLU", named("lenet-dlg", activation="relu")),
                ("cnn2 (max-pooling)", named("cnn2", **NARROW)),
                ("cnn2 with average pooling", named("cnn2", **NARROW, pool="avg")),
                ("lenet5 (max-pooling)", named("lenet5")),
            )
        ),
        DIGIT("IG 1500, sigmoid LeNet, MNIST", IG(1500), n=5),
        Case("DLG, ReLU CNN, MNIST (the wrong attack)", DLG(100, 2), relu_cnn, n=5),
    ],
}


def part_adaptive() -> None:
    """Noise everywhere but on one layer (r is printed), the attacker told or not; then on the largest entries only."""
    for data in BOTH:
        for clean, what, sigma in (("5.", "linear layer", 2.0), ("0.", "first convolution", 0.1)):
            for how in ("naive", "adaptive"):
                label = f"IG 500 {how}, {{data}}, {what} left clean"
                Case(label, IG(500), relu_cnn, data, noise=sigma, clean=clean, told=how == "adaptive")()
        for label, informed in (("naive", False), ("drops the largest 10 % received", True)):
            _top_noised(data, label, informed)


def _top_noised(data: str, label: str, informed: bool) -> None:
    (truth, y), module, bounds = images(data, 5), relu_cnn(SHAPES[data]), bounds_of(SHAPES[data])
    x, scores = bounds.inputs(truth), list[float]()
    for i in range(len(x)):
        clean = upload(module, x[i : i + 1], y[i : i + 1], {}, i).tensors
        keep = withheld_guess(CapturedUpload(clean), 0.1)
        rng = torch.Generator().manual_seed(20_000 + i)
        sent = CapturedUpload({k: v + 0.1 * torch.randn(v.shape, generator=rng) * ~keep[k] for k, v in clean.items()})
        knows = Knowledge(n=1, labels=y[i : i + 1], mask=withheld_guess(sent, 0.1) if informed else None)
        scores += metrics.psnr(found(IG(500), sent, module, knows, bounds, i).images, truth[i : i + 1]).tolist()
    print(f"IG 500, {data}, noise on the top 10 % only, {label:34s} PSNR median {np.median(scores):6.1f} dB", flush=True)


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
    (truth, y), module, bounds = images("mnist", 4), relu_cnn((1, 28, 28)), bounds_of((1, 28, 28))
    x = bounds.inputs(truth)
    for steps, lr in ((5, 0.003), (5, 0.01), (5, 0.1)):
        spec = KnownTraining(steps=steps, lr=lr)
        for label, local in (("one step assumed", KnownTraining(1, lr * steps)), ("unrolled", spec)):
            results = []
            for i in range(4):
                here = prepared(lambda: module, module.state_dict(), "eval", None)
                moved = -lr * steps * simulation(here, spec)(x[i : i + 1], y[i : i + 1]).detach()
                sent = CapturedUpload(split(moved, dict(here.named_parameters())), kind="delta", local=spec)
                results.append(found(IG(500), sent, module, Knowledge(n=1, local=local), bounds, i))
            median = float(np.median(metrics.psnr(torch.cat([r.images for r in results]), truth)))
            line = f"IG 500, MNIST, {steps} local steps at {lr}, {label:18s} PSNR median {median:6.1f} dB"
            print(f"{line}  {np.mean([r.steps_per_second for r in results]):.0f} steps/s", flush=True)


def part_gradinversion() -> None:
    """GradInversion on single images and on a batch."""
    joint = GradInversion(500, 2)
    for data in BOTH:
        Case("GradInversion 500, 2 joint starts, {data}", joint, relu_cnn, data, 5)()
    (truth, y), module, bounds = images("cifar10", 4), relu_cnn((3, 32, 32)), bounds_of((3, 32, 32))
    sent = upload(module, bounds.inputs(truth), y, {}, 0)
    for label, attack in (("IG 1000", IG(1000)), ("GradInversion 500, 2 joint starts", joint)):
        result = found(attack, sent, module, Knowledge(n=4, labels=y), bounds, 0)
        median = float(metrics.psnr(metrics.matched(result.images, truth), truth).median())
        line = f"{label}, batch of 4, CIFAR-10: PSNR median {median:.1f} dB"
        print(f"{line}, {result.steps_per_second:.0f} steps/s", flush=True)


def part_speed() -> None:
    """Steps per second, and the time of a step over that of the bare passes it cannot do without, taken in turns.

    Bare: forward, gradient with its graph, distance, gradient by the image. Medians of 9 turns, so that other work on the
    machine slows both sides alike.
    """
    for name, shape in SHAPES.items():
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
    module, case, rows = relu_cnn((3, 32, 32)), partial(Case, attack=IG(500), network=relu_cnn), []
    for one in (
        case("no noise"),
        case("sigma 0.01", noise=0.01),
        case("sigma 0.1", noise=0.1),
        case("all but last\nlayer: naive", noise=2.0, clean="5."),
        case("all but last\nlayer: adaptive", noise=2.0, clean="5.", told=True),
    ):
        made = [one.attacked(i, module, truth[i : i + 1], y[i : i + 1])[1].images for i in range(len(truth))]
        rows.append((one.label, torch.cat(made)))
    path = ROOT / "docs" / "attacks.png"
    print(save_comparison(path, truth, rows, "Inverting Gradients, CIFAR-10, one example per upload"))


def part_cases(name: str) -> None:
    """The lines of a part that is declared."""
    for case in CASES[name]:
        case()


PARTS: dict[str, Callable[[], None]] = {
    **{name: partial(part_cases, name) for name in ("dlg", "ig", "noise")},
    "adaptive": part_adaptive,
    "labels": part_labels,
    "local": part_local,
    "gradinversion": part_gradinversion,
    "networks": partial(part_cases, "networks"),
    "speed": part_speed,
    "picture": part_picture,
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS)
