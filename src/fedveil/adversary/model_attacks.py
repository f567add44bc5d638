"""Attacks on the released model: attribute, extraction."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from fedveil.adversary.attack_options import Options, Outcome, Tell, taken
from fedveil.attacks.attribute import CIFAR10_ANIMALS, infer_attribute
from fedveil.attacks.extraction import KnowledgeExtraction
from fedveil.attacks.features import features
from fedveil.attacks.simulate import prepared
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fedveil.adversary.snapshot import Scene

ATTRIBUTES: dict[str, tuple[str, tuple[int, ...]]] = {
    "cifar10": ("animal", CIFAR10_ANIMALS),
    "fashion-mnist": ("footwear", (5, 7, 9)),
    "mnist": ("even digit", (0, 2, 4, 6, 8)),
    "digits": ("even digit", (0, 2, 4, 6, 8)),
}
"""What is inferred by default, as the classes that have it."""


def attribute(kind: str, scene: Scene, options: Options, tell: Tell) -> Outcome:
    """An attribute of training examples, by a logistic probe on the released model's penultimate features."""
    name, classes = ATTRIBUTES.get(scene.info.name, ("", ()))
    given = taken(kind, options, {"classes": classes, "auxiliary": 2000})
    if "classes" in options.settings:
        name = f"class in {list(given['classes'])}"
    if not given["classes"]:
        raise ConfigError(
            f"{scene.info.name} has no attribute of its own: give --set attack.classes=[0, 1] (classes that have it)"
        )
    x, y = scene.federation.test
    own = scene.federation.context.clients
    rng = torch.Generator().manual_seed(options.seed)
    n = min(options.images or 1000, len(own.y))
    chosen = torch.randperm(len(own.y), generator=rng)[:n]
    wanted, model = torch.tensor(list(given["classes"])), _model(scene)
    aux = min(given["auxiliary"], len(y))
    found = infer_attribute(
        features(model, x[:aux]),
        torch.isin(y[:aux], wanted),
        features(model, own.x[chosen]),
        torch.isin(own.y[chosen], wanted),
        options.seed % 2**31,
    )
    tell(1, 1, "probe")
    figures = {
        "balanced accuracy": f"{found.balanced_accuracy:.1%} (chance 50 %)",
        "AUC": f"{found.auc:.3f}",
        "accuracy": f"{found.accuracy:.1%} of {n}, constant guess {found.constant_guess:.1%}",
        "advantage over the constant guess": f"{100 * found.advantage:+.1f} points",
    }
    words = [f"attribute '{name}' (classes {list(given['classes'])}), probe trained on {aux} public examples", _which(scene)]
    return Outcome(figures, {**asdict(found), "attribute": name, "classes": list(given["classes"])}, words)


def extraction(kind: str, scene: Scene, options: Options, tell: Tell) -> Outcome:
    """A student trained on the released model's answers to public queries."""
    given = taken(kind, options, {"epochs": 50, "lr": 1e-3, "patience": 5})
    x, y = scene.federation.test
    half = len(y) // 2
    queries = x[: min(options.images or 2000, half)]
    config = KnowledgeExtraction(epochs=given["epochs"], lr=given["lr"], patience=given["patience"])
    tell(0, 1, f"student on {len(queries)} queries")
    _, found = config.run(_model(scene), scene.make_model, queries, (x[half:], y[half:]), _rng(options.seed))
    tell(1, 1, "student")
    figures = {
        "student's accuracy": f"{found.student_accuracy:.1%}, victim's {found.victim_accuracy:.1%}",
        "agreement with the victim": f"{found.agreement:.1%} of {len(y) - half}",
        "queries, epochs": f"{found.queries}, {found.epochs}",
        "KL on held-out queries": f"{found.held_out_kl:.3g} nats",
    }
    words = [
        "the queried model is already noised: this measures what it is worth to a thief, not privacy",
        f"queries are the first {len(queries)} public test examples, scores are on the last {len(y) - half}",
        _which(scene),
    ]
    return Outcome(figures, asdict(found), words)


def _model(scene: Scene) -> nn.Module:
    """The released global model, in evaluation mode."""
    model = scene.make_model()
    module = prepared(lambda: model, scene.state, "eval", None)
    return module.eval()


def _which(scene: Scene) -> str:
    return f"the model after {scene.progress.round} rounds, as released"


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
