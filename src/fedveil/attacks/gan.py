"""A generative adversarial network trained by a curious client, and the distance of its images from those of a class.

A Frechet distance depends on its feature extractor, so every score carries the extractor's name ("FD-<name>"). It is the
Frechet Inception Distance only if the extractor is that Inception network, which is not shipped here. Scores grow as n falls:
they are always computed at equal n and printed with the distance between two halves of the real images.

The attacker follows the protocol. In each round it also takes the body and class head of the global model as a fixed feature
extractor, and trains its own real/fake head and a class-conditional generator. It obtains a prototype of a class that it has
never seen, not a record; classes that it owns are the control.
"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.attack_types import Bounds, ModelFn
from fedveil.attacks.matching import prepared
from fedveil.errors import ConfigError

LossFn = Callable[[Tensor, Tensor], Tensor]


def _classifier_of(module: nn.Module) -> nn.Linear:
    """Return the last linear layer."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ConfigError("the model has no linear layer, so it has no penultimate features")
    return layers[-1]


def penultimate(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of the last linear layer (n, features) and the logits (n, classes), differentiable in x."""
    caught: list[Tensor] = []
    hook = _classifier_of(module).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        logits: Tensor = module(x)
    finally:
        hook.remove()
    return caught[-1], logits


def features(module: nn.Module, x: Tensor, batch: int = 500) -> Tensor:
    """Return penultimate features of many examples, without gradients, in evaluation mode (n, features)."""
    module.eval()
    with torch.no_grad():
        return torch.cat([penultimate(module, part)[0] for part in torch.split(x, batch)])


def predictions(module: nn.Module, x: Tensor, batch: int = 500) -> Tensor:
    """Return logits of many examples, without gradients, in evaluation mode (n, classes)."""
    module.eval()
    with torch.no_grad():
        return torch.cat([module(part) for part in torch.split(x, batch)])


@dataclass(frozen=True)
class Fitting:
    """The training of an attacker's model: Adam for at most `epochs` epochs; `stop(epoch)`, called after each, may end it."""

    epochs: int
    loss: LossFn = F.cross_entropy
    lr: float = 1e-3
    batch: int = 64
    stop: Callable[[int], bool] | None = None


def fit(module: nn.Module, x: Tensor, y: Tensor, rng: torch.Generator, how: Fitting) -> int:
    """Train an attacker's model in place on (x, y), and return the number of epochs."""
    optimizer = torch.optim.Adam(module.parameters(), lr=how.lr)
    for epoch in range(1, how.epochs + 1):
        module.train()
        for chosen in torch.split(torch.randperm(len(x), generator=rng), how.batch):
            optimizer.zero_grad()
            how.loss(module(x[chosen]), y[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if how.stop is not None and how.stop(epoch):
            return epoch
    return how.epochs


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Extractor:
    """A named feature function: images in [0, 1], (n, *shape), to features (n, k)."""

    name: str
    features: Callable[[Tensor], Tensor]


def from_classifier(name: str, module: nn.Module, to_inputs: Callable[[Tensor], Tensor] = lambda images: images) -> Extractor:
    """Return an extractor of the penultimate features of a classifier; `to_inputs` turns images into its inputs."""
    return Extractor(name, lambda images: features(module, to_inputs(images)))


def from_file(path: str) -> Extractor:
    """Return an extractor of the features of a network saved by `torch.export.save`, such as Inception.

    Raises:
        ConfigError: the file is no saved program.
    """
    if not zipfile.is_zipfile(path):
        raise ConfigError(
            f"attack.features = {path!r}: no file of torch.export.save: save a network that turns images (n, *shape) in [0, 1] "
            "into features (n, k), with the dimension n dynamic"
        )
    return Extractor(Path(path).stem, torch.no_grad()(torch.export.load(path).module()))


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """|mean_a - mean_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)) of two feature sets (n, k), with unbiased covariances S.

    The trace of the root is the sum of the roots of the eigenvalues of S_a^(1/2) S_b S_a^(1/2).
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ConfigError(f"feature sets need shape (n >= 2, k) with one k, got {tuple(a.shape)} and {tuple(b.shape)}")
    first, second = a.double().numpy(), b.double().numpy()
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ConfigError("features must be finite")
    cov_a, cov_b = np.atleast_2d(np.cov(first.T)), np.atleast_2d(np.cov(second.T))
    values, vectors = eigh(cov_a)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(eigh(root @ cov_b @ root, eigvals_only=True).clip(0)).sum()
    shift = first.mean(0) - second.mean(0)
    return float(shift @ shift + np.trace(cov_a) + np.trace(cov_b) - 2 * cross)


@dataclass(frozen=True)
class ClassScores:
    """Scores of generated images of one class. metric: "FD-<extractor>".

    distance: to real images of the class. same_source: between two disjoint halves of the real images (the best possible).
    other_class: from real images of other classes to the class. class_rate: share of the generated images that an independent
    classifier assigns to the class. All distances use the same n on both sides.
    """

    metric: str
    distance: float
    same_source: float
    other_class: float
    class_rate: float
    n: int


def class_scores(
    generated: Tensor, real: Tensor, others: Tensor, label: int, extractor: Extractor, logits: Callable[[Tensor], Tensor]
) -> ClassScores:
    """Score generated images of class `label`; all images (n, *shape) in [0, 1].

    real: real images of the class, at least 4. others: real images of other classes. logits: an independent classifier.
    """
    n = min(len(generated), len(real) // 2, len(others))
    if n < 2:
        raise ConfigError(
            f"scores need at least 2 generated, 4 real and 2 other images, got {len(generated)}, {len(real)}, {len(others)}"
        )
    found = extractor.features
    first, second = found(real[:n]), found(real[n : 2 * n])
    return ClassScores(
        metric=f"FD-{extractor.name}",
        distance=frechet_distance(found(generated[:n]), first),
        same_source=frechet_distance(second, first),
        other_class=frechet_distance(found(others[:n]), first),
        class_rate=float((logits(generated[:n]).argmax(1) == label).double().mean()),
        n=n,
    )


def classifier_logits(
    module: nn.Module, to_inputs: Callable[[Tensor], Tensor] = lambda images: images
) -> Callable[[Tensor], Tensor]:
    """Return a function from images in [0, 1] to the logits of a classifier."""
    return lambda images: predictions(module, to_inputs(images))


def split_by_class(images: Tensor, labels: Tensor, label: int) -> tuple[Tensor, Tensor]:
    """Split images into those of the class and all others."""
    of_class: Tensor = torch.eq(labels, label)
    return images[of_class], images[~of_class]


@dataclass(frozen=True)
class CuriousClient:
    """Settings of the passive attack: generator and heads learn by Adam at `lr`, `steps` steps per observed round.

    private: classes to generate, which the attacker does not own. train_class_head: whether a copy of the class head also learns
    the attacker's own labels within a round; it then unlearns the private classes until the next global model arrives.
    """

    private: tuple[int, ...]
    steps: int = 200
    batch: int = 64
    lr: float = 2e-4
    betas: tuple[float, float] = (0.5, 0.999)
    latent: int = 100
    train_class_head: bool = False


@dataclass
class Gan:
    """The state of the attacker between rounds: the generator, the real/fake head and their optimizers."""

    generator: nn.Sequential
    head: nn.Linear
    generator_optimizer: torch.optim.Adam
    head_optimizer: torch.optim.Adam
    classes: int
    latent: int
    bounds: Bounds


def generator(bounds: Bounds, classes: int, latent: int, rng: torch.Generator) -> nn.Sequential:
    """Build a generator from noise and one-hot class, (n, latent + classes), to images in [-1, 1] with sides divisible by 4.

    A linear layer to 256 channels at a quarter of the size, two transposed convolutions (128, 64), tanh.
    """
    if len(bounds.shape) != 3:
        raise ConfigError(f"the generator draws images (channels, height, width), and examples here have shape {bounds.shape}")
    channels, height, width = bounds.shape
    if height % 4 or width % 4:
        raise ConfigError(f"the generator needs sides divisible by 4, got {height}x{width}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(2**31, (), generator=rng)))
        return nn.Sequential(
            nn.Linear(latent + classes, 256 * (height // 4) * (width // 4)),
            nn.Unflatten(1, (256, height // 4, width // 4)),
            nn.BatchNorm2d(256),
            nn.ReLU(),
            nn.ConvTranspose2d(256, 128, 4, 2, 1),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.ConvTranspose2d(128, 64, 4, 2, 1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, channels, 3, padding=1),
            nn.Tanh(),
        )


def start(config: CuriousClient, model_fn: ModelFn, classes: int, bounds: Bounds, rng: torch.Generator) -> Gan:
    """Return a new attacker for the networks that `model_fn` builds."""
    if not config.private or not all(0 <= c < classes for c in config.private):
        raise ConfigError(f"private classes must lie in 0..{classes - 1} and not be empty, got {config.private}")
    made = generator(bounds, classes, config.latent, rng)
    head = nn.Linear(_classifier_of(model_fn()).in_features, 1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=rng) * 0.05)
        head.bias.zero_()
    optimizers = [torch.optim.Adam(m.parameters(), lr=config.lr, betas=config.betas) for m in (made, head)]
    return Gan(made, head, optimizers[0], optimizers[1], classes, config.latent, bounds)


def sample(gan: Gan, labels: Tensor, rng: torch.Generator) -> Tensor:
    """Generate differentiable inputs of the given classes, (n, *shape) in the model's units."""
    noise = torch.randn((len(labels), gan.latent), generator=rng)
    drawn: Tensor = gan.generator(torch.cat([noise, F.one_hot(labels, gan.classes).float()], 1))
    return gan.bounds.inputs((drawn + 1) / 2)


def generate(gan: Gan, label: int, n: int, rng: torch.Generator, batch: int = 500) -> Tensor:
    """Generate n images of one class in [0, 1], after training."""
    gan.generator.eval()
    with torch.no_grad():
        parts = [sample(gan, torch.full((min(batch, n - i),), label), rng) for i in range(0, n, batch)]
    return gan.bounds.images(torch.cat(parts))


def observe(
    gan: Gan,
    config: CuriousClient,
    model_fn: ModelFn,
    state: Mapping[str, Tensor],
    own: tuple[Tensor, Tensor],
    rng: torch.Generator,
) -> tuple[float, float]:
    """Learn from one released global model `state`, and return the mean losses of the discriminator and the generator.

    own: the attacker's inputs (n, *shape) and labels (n,); ConfigError is raised if one is of a private class.
    Discriminator: real/fake cross-entropy on own data and fakes (+ cross-entropy of own labels where the class head learns).
    Generator: fakes should pass as real and be classified as the class that they were generated for, over all classes.
    """
    x, y = own
    owned_private = sorted(set(y.tolist()) & set(config.private))
    if owned_private:
        raise ConfigError(f"the attacker must not own private classes, but its data contain {owned_private}")
    module = prepared(model_fn, state, "eval", None)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    class_head = copy.deepcopy(_classifier_of(module))
    optimizers = [gan.head_optimizer]
    if config.train_class_head:
        class_head.requires_grad_(True)
        optimizers.append(torch.optim.Adam(class_head.parameters(), lr=config.lr, betas=config.betas))
    gan.generator.train()
    totals = torch.zeros(2)
    for _ in range(config.steps):
        chosen = torch.randint(len(x), (config.batch,), generator=rng)
        wanted = torch.randint(gan.classes, (config.batch,), generator=rng)
        real, _ = penultimate(module, x[chosen])
        made, _ = penultimate(module, sample(gan, wanted, rng))
        judged = _real_fake(gan.head(real), True) + _real_fake(gan.head(made.detach()), False)
        if config.train_class_head:
            judged = judged + F.cross_entropy(class_head(real), y[chosen])
        _step(optimizers, judged)
        fooled = _real_fake(gan.head(made), True) + F.cross_entropy(class_head(made), wanted)
        _step([gan.generator_optimizer], fooled)
        totals += torch.stack([judged.detach(), fooled.detach()])
    return float(totals[0]) / config.steps, float(totals[1]) / config.steps


def _real_fake(logits: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def _step(optimizers: Sequence[torch.optim.Optimizer], loss: Tensor) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
