"""Prediction of the next token, or of masked tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from fedveil.data.catalogue import IGNORED, Info
from fedveil.tasks.task import ACCURACY, Column, Evidence, Task, need_classes

if TYPE_CHECKING:
    from torch import Tensor


class TokenPrediction(Task):
    """The next or the masked tokens of a sequence: the mean cross-entropy of its places, without those that are IGNORED.

    For the next token, targets are the inputs shifted by one; for masked tokens, targets are IGNORED at unmasked places.
    """

    metrics: ClassVar = (
        Column("perplexity", "Perplexity", "perplexity", "lower"),
        Column("bits", "Bits a token", "bits", "lower"),
        ACCURACY,
    )
    loss_unit: ClassVar = "cross-entropy, mean over places"
    output_form: ClassVar = "[n, T, V], a score for each token of the vocabulary at each place"
    trivial_answer: ClassVar = "always the shares of the tokens in the test set"

    name: Literal["token-prediction"] = "token-prediction"

    def check(self, info: Info) -> None:
        """Require targets that are sequences of tokens."""
        need_classes(self.name, info, 1)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the most likely token at each place."""
        return output.argmax(2)

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probability of each token at each place [n, T, V]."""
        return output.softmax(2)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over each example's places; 0 if all are IGNORED."""
        each, counted = self._places(output, target)
        return each.sum(1) / counted.sum(1).clamp_min(1)

    def _places(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy [n, T], and a mask of the places that count."""
        from torch.nn import functional as F

        return F.cross_entropy(output.mT, target, ignore_index=IGNORED, reduction="none"), target != IGNORED

    def evidence(self, output: Tensor, target: Tensor) -> Evidence:
        """Return per example [n] the sum of cross-entropies, the number of places that count, and the number of correct ones."""
        each, counted = self._places(output, target)
        return each.double().sum(1), counted.sum(1), (output.argmax(2) == target).sum(1)

    def test_loss(self, *evidence: Tensor) -> float:
        """Return the mean over the examples, as in training."""
        total, places, _ = evidence
        return float((total / places.clamp_min(1)).mean())

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Return the metrics over all places together; NaN if no place counts."""
        total, places, right = (float(part.sum()) for part in evidence)
        if not places:
            return dict.fromkeys((column.name for column in self.metrics), math.nan)
        nats = total / places
        return {"perplexity": math.exp(min(nats, 700.0)), "bits": nats / math.log(2), "accuracy": right / places}

    def trivial(self, target: Tensor) -> float | None:
        """Return the perplexity of the tokens' frequencies, independent of context; None if no place counts."""
        counts = target[target != IGNORED].bincount().double()
        shares = counts[counts > 0] / counts.sum()
        return math.exp(-float((shares * shares.log()).sum())) if len(shares) else None
