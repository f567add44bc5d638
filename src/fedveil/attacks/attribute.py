"""An attribute that is not the label, read from a model's features by a logistic probe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

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
