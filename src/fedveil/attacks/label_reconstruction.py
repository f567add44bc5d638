"""Labels of single examples, from their gradients or from the model's outputs; the two rules answer different questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedveil.attacks.attack_types import CapturedUpload, Knowledge, ModelFn
from fedveil.attacks.features import predictions
from fedveil.attacks.labels import single_label
from fedveil.attacks.matching import read
from fedveil.attacks.simulate import prepared


@dataclass(frozen=True)
class LabelReconstruction:
    """Accuracy of reconstructed labels. rule: "gradient" (last-bias rule on an upload) or "output" (argmax of the model)."""

    rule: Literal["gradient", "output"]
    accuracy: float
    constant_guess: float
    n: int


def from_gradients(
    uploads: Sequence[CapturedUpload], truth: Tensor, model_fn: ModelFn, state: Mapping[str, Tensor], knowledge: Knowledge
) -> LabelReconstruction:
    """Rule "gradient": each upload holds one example; its label is the class of the most negative last-bias gradient."""
    guesses = torch.tensor([single_label(target) for target in read(uploads, model_fn, state, knowledge)])
    return _judged("gradient", guesses, truth)


def from_outputs(x: Tensor, truth: Tensor, model_fn: ModelFn, state: Mapping[str, Tensor]) -> LabelReconstruction:
    """Rule "output": the model's own prediction; it follows accuracy, not what an upload leaks. x: (n, *shape)."""
    return _judged("output", predictions(prepared(model_fn, state, "eval", None), x).argmax(1), truth)


def _judged(rule: Literal["gradient", "output"], guesses: Tensor, truth: Tensor) -> LabelReconstruction:
    accuracy = float((guesses == truth).double().mean())
    return LabelReconstruction(rule, accuracy, float(truth.bincount().max()) / len(truth), len(truth))
