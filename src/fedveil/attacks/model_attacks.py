"""Attacks on the released model: an attribute read from its features, and its knowledge extracted into a student.

The queried model is already noised, so this is post-processing: it measures what the model is worth to a thief, not privacy.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.attack_options import Attack, AttackOptions, AttackOutcome, Examples, OnProgress, Place, setting
from fedveil.attacks.attack_types import ModelFn
from fedveil.attacks.gan import Fitting, features, fit, predictions
from fedveil.attacks.matching import prepared
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from fedveil.attacks.snapshot import Snapshot


CIFAR10_ANIMALS = (2, 3, 4, 5, 6, 7)
_HELD_OUT = 0.1
"""Share of the queries at which the training of a student is stopped."""


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
    """Result of an extraction: accuracies and agreement with the victim on test data, and the last loss on held-out queries."""

    victim_accuracy: float
    student_accuracy: float
    agreement: float
    held_out_kl: float
    queries: int
    epochs: int


def divergence(logits: Tensor, answers: Tensor) -> Tensor:
    """Mean KL(answers || softmax(logits)) in nats; answers: probabilities (n, classes)."""
    return F.kl_div(logits.log_softmax(1), answers, reduction="batchmean")


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())


_ATTRIBUTES: dict[str, tuple[str, tuple[int, ...]]] = {
    "cifar10": ("animal", CIFAR10_ANIMALS),
    "fashion-mnist": ("footwear", (5, 7, 9)),
    "mnist": ("even digit", (0, 2, 4, 6, 8)),
    "digits": ("even digit", (0, 2, 4, 6, 8)),
}
"""The default attribute of each data set, as the classes that have it."""


@dataclass(frozen=True)
class AttributeProbe(Attack):
    """An attribute of training examples, by a logistic probe on the released model's penultimate features.

    The attacker's own examples are the first of the test split; attacked are training examples, or the test examples after those.
    """

    name: ClassVar[str] = "attribute"
    place: ClassVar[Place] = "last"
    examples: ClassVar[tuple[Examples, ...]] = ("test",)
    classes: tuple[int, ...] = ()
    auxiliary: int = setting(2000, least=1)

    def on(self, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
        name, classes = _ATTRIBUTES.get(snapshot.info.name, ("", ()))
        if self.classes:
            name, classes = f"class in {list(self.classes)}", self.classes
        if not classes:
            raise ConfigError(
                f"{snapshot.info.name} has no attribute of its own: give --set attack.classes=[0, 1] (classes that have it)"
            )
        x, y = snapshot.federation.test
        aux, n = min(self.auxiliary, len(y)), options.images or 1000
        if options.examples == "test":
            attacked = x[aux : aux + n], y[aux : aux + n]
            if not len(attacked[1]):
                raise ConfigError(f"attack.auxiliary = {aux} leaves none of the {len(y)} test examples to attack: give fewer")
        else:
            own = snapshot.federation.context.clients
            chosen = torch.randperm(len(own.y), generator=options.generator())[: min(n, len(own.y))]
            attacked = own.x[chosen], own.y[chosen]
        wanted, model = torch.tensor(list(classes)), _released(snapshot)
        result = infer_attribute(
            features(model, x[:aux]),
            torch.isin(y[:aux], wanted),
            features(model, attacked[0]),
            torch.isin(attacked[1], wanted),
            options.seed % 2**31,
        )
        on_progress(1, 1, "probe")
        figures = {
            "balanced accuracy": f"{result.balanced_accuracy:.1%} (chance 50 %)",
            "AUC": f"{result.auc:.3f}",
            "accuracy": f"{result.accuracy:.1%} of {result.n_test}, constant guess {result.constant_guess:.1%}",
            "advantage over the constant guess": f"{100 * result.advantage:+.1f} points",
        }
        words = [f"attribute '{name}' (classes {list(classes)}), probe trained on {aux} public examples"]
        return _outcome(snapshot, figures, {**asdict(result), "attribute": name, "classes": list(classes)}, words)


@dataclass(frozen=True)
class KnowledgeExtraction(Attack):
    """A student trained on the released model's answers to public queries, and scored on the second half of the test examples.

    It is scored on those only that are no queries. `student` is the seed of its initial weights; the run's by default.
    """

    name: ClassVar[str] = "extraction"
    place: ClassVar[Place] = "last"
    epochs: int = setting(50, least=1)
    lr: float = setting(1e-3, above=0)
    patience: int = setting(5, least=1)
    student: int | None = None

    def on(self, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
        x, y = snapshot.federation.test
        asked = options.images or min(2000, len(y) // 2)
        left = max(len(y) // 2, asked)
        if left >= len(y):
            raise ConfigError(
                f"{asked} queries leave none of the {len(y)} public test examples to score the student on: ask fewer"
            )
        on_progress(0, 1, f"student on {asked} queries")
        student = partial(snapshot.make_model, self.student)
        _, result = self.run(_released(snapshot), student, x[:asked], (x[left:], y[left:]), options.generator())
        on_progress(1, 1, "student")
        figures = {
            "student's accuracy": f"{result.student_accuracy:.1%}, victim's {result.victim_accuracy:.1%}",
            "agreement with the victim": f"{result.agreement:.1%} of {len(y) - left}",
            "queries, epochs": f"{result.queries}, {result.epochs}",
            "KL on held-out queries": f"{result.held_out_kl:.3g} nats",
        }
        words = [
            "the queried model is already noised: this measures what it is worth to a thief, not privacy",
            f"queries are the first {asked} public test examples, scores are on the last {len(y) - left}",
        ]
        return _outcome(snapshot, figures, asdict(result), words)

    def run(
        self, victim: nn.Module, student_fn: ModelFn, queries: Tensor, test: tuple[Tensor, Tensor], rng: torch.Generator
    ) -> tuple[nn.Module, Extraction]:
        """Train a student on the victim's logits for `queries` (n, *shape); returns it with its scores on `test` = (x, y)."""
        kept = round(len(queries) * (1 - _HELD_OUT))
        if not 0 < kept < len(queries):
            raise ConfigError(f"{len(queries)} queries with held_out = {_HELD_OUT} leave none to train or none to stop on")
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

        how = Fitting(self.epochs, divergence, self.lr, stop=stop)
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


def _released(snapshot: Snapshot) -> nn.Module:
    """The global model, in evaluation mode."""
    return prepared(*snapshot.model, "eval", None)


def _outcome(snapshot: Snapshot, figures: dict[str, str], record: dict[str, Any], words: list[str]) -> AttackOutcome:
    return AttackOutcome(figures, record, [*words, f"the model after {snapshot.progress.round} rounds, as released"])
