"""Attacks on a released model: an attribute read from its features, and its knowledge extracted into a student.

The queried model is already noised, so this is post-processing: it measures what the model is worth to a thief, not privacy.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.attack_types import ModelFn
from fedveil.attacks.gan import Fitting, fit, predictions
from fedveil.errors import ConfigError

CIFAR10_ANIMALS = (2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class AttributeInference:
    """A probe's success on unseen examples.

    balanced_accuracy: 0.5 is chance. auc: area under the ROC curve. accuracy with constant_guess, the accuracy of always
    answering the commoner value; advantage: accuracy - constant_guess.
    """

    balanced_accuracy: float
    auc: float
    accuracy: float
    constant_guess: float
    advantage: float
    n_train: int
    n_test: int


def infer_attribute(
    known: Tensor, known_attribute: Tensor, attacked: Tensor, attribute: Tensor, seed: int = 0
) -> AttributeInference:
    """Fit a logistic probe on auxiliary examples and apply it to the attacked ones.

    known, attacked: features or flattened uploads, (n, k). known_attribute, attribute: booleans (n,).
    Raises ConfigError when an attribute has one value only, or features are not finite.
    """
    for name, values in (("known_attribute", known_attribute), ("attribute", attribute)):
        if bool(values.bool().all()) or not bool(values.bool().any()):
            raise ConfigError(f"{name} must hold both values, it holds one")
    if not bool(torch.isfinite(known).all() and torch.isfinite(attacked).all()):
        raise ConfigError("features must be finite")
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, random_state=seed))
    probe.fit(known.numpy(), known_attribute.long().numpy())
    truth = attribute.long().numpy()
    guess, score = probe.predict(attacked.numpy()), probe.decision_function(attacked.numpy())
    accuracy = float((guess == truth).mean())
    constant = float(max(truth.mean(), 1 - truth.mean()))
    return AttributeInference(
        balanced_accuracy=float(balanced_accuracy_score(truth, guess)),
        auc=float(roc_auc_score(truth, score)),
        accuracy=accuracy,
        constant_guess=constant,
        advantage=accuracy - constant,
        n_train=len(known),
        n_test=len(attacked),
    )


@dataclass(frozen=True)
class Extraction:
    """What the student reached: accuracies on test data, agreement with the victim there, its last loss on held-out queries."""

    victim_accuracy: float
    student_accuracy: float
    agreement: float
    held_out_kl: float
    queries: int
    epochs: int


@dataclass(frozen=True)
class KnowledgeExtraction:
    """Settings of the student: Adam at `lr`, KL divergence at temperature 1, early stop on a held-out share of the queries.

    patience: epochs without a better held-out divergence before stopping; the best student is kept.
    """

    epochs: int = 50
    lr: float = 1e-3
    batch: int = 64
    held_out: float = 0.1
    patience: int = 5

    def run(
        self, victim: nn.Module, student_fn: ModelFn, queries: Tensor, test: tuple[Tensor, Tensor], rng: torch.Generator
    ) -> tuple[nn.Module, Extraction]:
        """Train a student on the victim's logits for `queries` (n, *shape); returns it with its scores on `test` = (x, y)."""
        kept = round(len(queries) * (1 - self.held_out))
        if not 0 < kept < len(queries):
            raise ConfigError(f"{len(queries)} queries with held_out = {self.held_out} leave none to train or none to stop on")
        answers = predictions(victim, queries).softmax(1)
        student = student_fn()
        best, best_loss, waited = copy.deepcopy(student.state_dict()), float("inf"), 0

        def stop(epoch: int) -> bool:
            nonlocal best, best_loss, waited
            loss = float(divergence(predictions(student, queries[kept:]), answers[kept:]))
            waited = waited + 1 if loss >= best_loss else 0
            if loss < best_loss:
                best, best_loss = copy.deepcopy(student.state_dict()), loss
            return waited >= self.patience

        how = Fitting(self.epochs, divergence, self.lr, self.batch, stop)
        epochs = fit(student, queries[:kept], answers[:kept], rng, how)
        student.load_state_dict(best)
        x, y = test
        theirs, ours = predictions(victim, x).argmax(1), predictions(student, x).argmax(1)
        scores = Extraction(
            victim_accuracy=_share(theirs == y),
            student_accuracy=_share(ours == y),
            agreement=_share(ours == theirs),
            held_out_kl=best_loss,
            queries=len(queries),
            epochs=epochs,
        )
        return student, scores


def divergence(logits: Tensor, answers: Tensor) -> Tensor:
    """Mean KL(answers || softmax(logits)) in nats; answers: probabilities (n, classes)."""
    return F.kl_div(logits.log_softmax(1), answers, reduction="batchmean")


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())
