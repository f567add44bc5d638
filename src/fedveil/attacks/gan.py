"""A generative adversarial network trained by a curious client on the global models it is sent (LaDP-FL, section VII-C).

The attacker does its federated duty unchanged; beside it, each round it takes the body and class head of the global model as
a fixed feature extractor and trains its own real/fake head and a class-conditional generator. What it obtains is a prototype
of a class it has never seen, not a record: classes it owns itself are the control.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.attack_types import Bounds, ModelFn
from fedveil.attacks.features import classifier_of, penultimate
from fedveil.attacks.simulate import prepared
from fedveil.errors import ConfigError


@dataclass(frozen=True)
class CuriousClient:
    """Settings of the passive attack: generator and heads learn by Adam at `lr`, `steps` steps per observed round.

    private: classes that the attacker does not own and wants. train_class_head: whether a copy of the class head also learns
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
    """What the attacker keeps between rounds: the generator, the real/fake head and their optimizers."""

    generator: nn.Sequential
    head: nn.Linear
    generator_optimizer: torch.optim.Adam
    head_optimizer: torch.optim.Adam
    classes: int
    latent: int
    bounds: Bounds


def generator(bounds: Bounds, classes: int, latent: int, rng: torch.Generator) -> nn.Sequential:
    """From noise and one-hot class, (n, latent + classes), to images in [-1, 1]; sides must be divisible by 4.

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
    """A fresh attacker for the networks that `model_fn` makes."""
    if not config.private or not all(0 <= c < classes for c in config.private):
        raise ConfigError(f"private classes must lie in 0..{classes - 1} and not be empty, got {config.private}")
    made = generator(bounds, classes, config.latent, rng)
    head = nn.Linear(classifier_of(model_fn()).in_features, 1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=rng) * 0.05)
        head.bias.zero_()
    optimizers = [torch.optim.Adam(m.parameters(), lr=config.lr, betas=config.betas) for m in (made, head)]
    return Gan(made, head, optimizers[0], optimizers[1], classes, config.latent, bounds)


def sample(gan: Gan, labels: Tensor, rng: torch.Generator) -> Tensor:
    """Generated inputs of the given classes, (n, *shape) in the model's units, with their graph."""
    noise = torch.randn((len(labels), gan.latent), generator=rng)
    drawn: Tensor = gan.generator(torch.cat([noise, F.one_hot(labels, gan.classes).float()], 1))
    return gan.bounds.inputs((drawn + 1) / 2)


def generate(gan: Gan, label: int, n: int, rng: torch.Generator, batch: int = 500) -> Tensor:
    """n images of one class in [0, 1], after training."""
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
    """Learn from one global model `state` (as released); returns the mean losses of the discriminator and the generator.

    own: the attacker's inputs (n, *shape) and labels (n,); none may be of a private class, or ConfigError is raised.
    Discriminator: real/fake cross-entropy on own data and fakes (+ cross-entropy of own labels where the class head learns).
    Generator: fakes should look real and be classified as the class they were made for, over all classes.
    """
    x, y = own
    held = sorted(set(y.tolist()) & set(config.private))
    if held:
        raise ConfigError(f"the attacker must not own private classes, but its data contain {held}")
    module = prepared(model_fn, state, "eval", None)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    class_head = copy.deepcopy(classifier_of(module))
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
