"""Attacks on the released model: attribute, extraction."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fedveil.adversary.attack_options import AttackOptions, AttackOutcome, OnProgress
from fedveil.attacks.gan import features
from fedveil.attacks.matching import prepared
from fedveil.attacks.probes import CIFAR10_ANIMALS, KnowledgeExtraction, infer_attribute
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fedveil.adversary.snapshot import Snapshot

ATTRIBUTES: dict[str, tuple[str, tuple[int, ...]]] = {
    "cifar10": ("animal", CIFAR10_ANIMALS),
    "fashion-mnist": ("footwear", (5, 7, 9)),
    "mnist": ("even digit", (0, 2, 4, 6, 8)),
    "digits": ("even digit", (0, 2, 4, 6, 8)),
}
"""What is inferred by default, as the classes that have it."""


def attribute(kind: str, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
    """An attribute of training examples, by a logistic probe on the released model's penultimate features.

    The attacker's own examples are the first of the test split; attacked are training examples, or the test examples after those.
    """
    name, classes = ATTRIBUTES.get(snapshot.info.name, ("", ()))
    settings = options.settings_of(kind, {"classes": classes, "auxiliary": 2000})
    if "classes" in options.settings:
        name = f"class in {list(settings['classes'])}"
    if not settings["classes"]:
        raise ConfigError(
            f"{snapshot.info.name} has no attribute of its own: give --set attack.classes=[0, 1] (classes that have it)"
        )
    x, y = snapshot.federation.test
    aux, n = min(settings["auxiliary"], len(y)), options.images or 1000
    if options.examples == "test":
        attacked = x[aux : aux + n], y[aux : aux + n]
        if not len(attacked[1]):
            raise ConfigError(f"attack.auxiliary = {aux} leaves none of the {len(y)} test examples to attack: give fewer")
    else:
        own = snapshot.federation.context.clients
        chosen = torch.randperm(len(own.y), generator=options.generator())[: min(n, len(own.y))]
        attacked = own.x[chosen], own.y[chosen]
    wanted, model = torch.tensor(list(settings["classes"])), _released(snapshot)
    found = infer_attribute(
        features(model, x[:aux]),
        torch.isin(y[:aux], wanted),
        features(model, attacked[0]),
        torch.isin(attacked[1], wanted),
        options.seed % 2**31,
    )
    on_progress(1, 1, "probe")
    figures = {
        "balanced accuracy": f"{found.balanced_accuracy:.1%} (chance 50 %)",
        "AUC": f"{found.auc:.3f}",
        "accuracy": f"{found.accuracy:.1%} of {found.n_test}, constant guess {found.constant_guess:.1%}",
        "advantage over the constant guess": f"{100 * found.advantage:+.1f} points",
    }
    words = [f"attribute '{name}' (classes {list(settings['classes'])}), probe trained on {aux} public examples"]
    return _outcome(snapshot, figures, {**asdict(found), "attribute": name, "classes": list(settings["classes"])}, words)


def extraction(kind: str, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
    """A student trained on the released model's answers to public queries, and scored on the second half of the test examples.

    It is scored on those only that are no queries. `student` is the seed of its initial weights; the run's by default.
    """
    settings = options.settings_of(kind, {"epochs": 50, "lr": 1e-3, "patience": 5, "student": None})
    x, y = snapshot.federation.test
    asked = options.images or min(2000, len(y) // 2)
    left = max(len(y) // 2, asked)
    if left >= len(y):
        raise ConfigError(f"{asked} queries leave none of the {len(y)} public test examples to score the student on: ask fewer")
    thief = KnowledgeExtraction(epochs=settings["epochs"], lr=settings["lr"], patience=settings["patience"])
    on_progress(0, 1, f"student on {asked} queries")
    student = partial(snapshot.make_model, settings["student"])
    _, found = thief.run(_released(snapshot), student, x[:asked], (x[left:], y[left:]), options.generator())
    on_progress(1, 1, "student")
    figures = {
        "student's accuracy": f"{found.student_accuracy:.1%}, victim's {found.victim_accuracy:.1%}",
        "agreement with the victim": f"{found.agreement:.1%} of {len(y) - left}",
        "queries, epochs": f"{found.queries}, {found.epochs}",
        "KL on held-out queries": f"{found.held_out_kl:.3g} nats",
    }
    words = [
        "the queried model is already noised: this measures what it is worth to a thief, not privacy",
        f"queries are the first {asked} public test examples, scores are on the last {len(y) - left}",
    ]
    return _outcome(snapshot, figures, asdict(found), words)


def _released(snapshot: Snapshot) -> nn.Module:
    """The global model, in evaluation mode."""
    return prepared(*snapshot.model, "eval", None)


def _outcome(snapshot: Snapshot, figures: dict[str, str], record: dict[str, Any], words: list[str]) -> AttackOutcome:
    return AttackOutcome(figures, record, [*words, f"the model after {snapshot.progress.round} rounds, as released"])
