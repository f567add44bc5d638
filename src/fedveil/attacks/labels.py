"""Labels and senders of intercepted uploads.

After the empirical study of membership inference in "Convergent Differential Privacy Analysis for General Federated Learning"
(table 11). The attacker has probe images of some target clients and sees unlabelled uploads. The paper does not specify
the matching; rule "inversion" reconstructs an example from each upload and compares features, rule "gradient" (cheaper and
stronger) compares the upload itself with the gradient on the probes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks.attack_types import Bounds, CapturedUpload, Knowledge, ModelFn
from fedveil.attacks.gan import features, predictions
from fedveil.attacks.matching import Target, gradient, prepared, read
from fedveil.errors import ConfigError


def _last_layer(names: Mapping[str, Tensor]) -> tuple[str, str | None]:
    """Return the names of the classifier's weight and bias: the last matrix (2 dimensions) among the parameters."""
    matrices = [name for name, value in names.items() if name.endswith("weight") and value.ndim == 2]
    if not matrices:
        raise ConfigError("the model has no linear layer to read labels from; give Knowledge.labels")
    bias = matrices[-1].removesuffix("weight") + "bias"
    return matrices[-1], bias if bias in names else None


def class_gradient(target: Target) -> Tensor:
    """Return the gradient of the last bias (classes,), in which db_c = mean_i p_ic - n_c / n.

    Raises ConfigError when the model has no last bias or the upload does not carry it.
    """
    named = target.named()
    _, bias = _last_layer(named)
    if bias is None:
        raise ConfigError("the last layer has no bias to read labels from; give Knowledge.labels")
    if not bool(named[bias].any()):
        raise ConfigError(f"{bias} was withheld; give Knowledge.labels")
    return named[bias]


def single_label(target: Target) -> int:
    """Return the label of one example: the class with the most negative last-bias gradient (Zhao et al. 2020, iDLG).

    Without a bias, the class whose row of the last weight's gradient has the smallest sum; that needs features >= 0.
    """
    named = target.named()
    weight, bias = _last_layer(named)
    return int((class_gradient(target) if bias is not None else named[weight].sum(1)).argmin())


def mean_prediction(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the mean class probabilities of the model on `inputs`, (classes,)."""
    with torch.no_grad():
        mean: Tensor = module(inputs).softmax(1).mean(0)
    return mean


def label_counts(bias_gradient: Tensor, prediction: Tensor, n: int) -> Tensor:
    """Return the number of examples of each class, int64 (classes,), with sum n.

    From db_c = mean_i p_ic - n_c / n follows n_c = n (p_c - db_c). The shares are floored (at 0) and the rest goes to the
    largest remainders. bias_gradient: (classes,). prediction: mean class probabilities on auxiliary data, (classes,).
    """
    if n < 1:
        raise ConfigError(f"label counts need n >= 1 examples, got {n}")
    share = (n * (prediction - bias_gradient)).double().clamp_min(0)
    share = share * (n / max(float(share.sum()), 1e-12)) if float(share.sum()) > n else share
    counts = share.floor().long()
    left = n - int(counts.sum())
    order = (share - counts).argsort(descending=True, stable=True)
    for i in range(left):
        counts[order[i % len(order)]] += 1
    return counts


def counted(target: Target, inputs: Tensor, n: int) -> Tensor:
    """Estimate the number of examples of each class from an upload and undo its clipping; `inputs` are auxiliary data."""
    gradient, prediction = class_gradient(target), mean_prediction(target.module, inputs)
    _, bias = _last_layer(target.named())
    assert bias is not None
    return label_counts(gradient * (_shrinkage(gradient, prediction, n) if target.clipped(bias) else 1), prediction, n)


def _shrinkage(bias_gradient: Tensor, prediction: Tensor, n: int) -> float:
    """Return the factor s >= 1 by which the clip shrank db: the one with counts n (p_c - s db_c) nearest to whole numbers.

    A positive db_c is at most p_c, so the class with the least p_c / db_c has the fewest examples: s follows from their number.
    """
    positive = bias_gradient > 0
    if not bool(positive.any()):
        return 1.0
    p, db = prediction.double(), bias_gradient.double()
    fewest = int(torch.where(positive, p / db, torch.inf).argmin())
    factors = (p[fewest] - torch.arange(n + 1) / n) / db[fewest]
    factors = factors[factors >= 1]
    if not len(factors):
        return 1.0
    shares = n * (p - factors[:, None] * db)
    return float(factors[(shares - shares.round()).square().sum(1).argmin()])


def unique_labels(target: Target, n: int) -> Tensor:
    """Return the n classes with the smallest min_j dW[c, j], for batches without repeated labels (Yin et al. 2021).

    Raises ConfigError when n exceeds the number of classes.
    """
    named = target.named()
    smallest = named[_last_layer(named)[0]].min(1).values
    if n > len(smallest):
        raise ConfigError(f"{n} examples cannot have unique labels among {len(smallest)} classes; use label counts")
    return smallest.topk(n, largest=False).indices.sort().values


def infer(target: Target, n: int, knowledge: Knowledge, bounds: Bounds, rng: torch.Generator) -> Tensor:
    """Return labels of n examples, sorted, int64 (n,): known labels, else the bias rule for one example, else label counts.

    Without auxiliary inputs, the mean prediction is computed on 256 uniform random images.
    """
    if knowledge.labels is not None:
        if len(knowledge.labels) != n:
            raise ConfigError(f"Knowledge.labels has {len(knowledge.labels)} entries for {n} examples")
        return knowledge.labels.long()
    if n == 1:
        return torch.tensor([single_label(target)])
    inputs = knowledge.aux_inputs
    if inputs is None:
        inputs = bounds.inputs(torch.rand((256, *bounds.shape), generator=rng))
    counts = counted(target, inputs, n)
    return torch.arange(len(counts)).repeat_interleave(counts)


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
    """Rule "output": the model's prediction, which depends on its accuracy and not on an upload. x: (n, *shape)."""
    return _judged("output", predictions(prepared(model_fn, state, "eval", None), x).argmax(1), truth)


def _judged(rule: Literal["gradient", "output"], guesses: Tensor, truth: Tensor) -> LabelReconstruction:
    accuracy = float((guesses == truth).double().mean())
    return LabelReconstruction(rule, accuracy, float(truth.bincount().max()) / len(truth), len(truth))


Rule = Literal["inversion", "gradient"]


@dataclass(frozen=True)
class Identification:
    """The success of matching targets to uploads.

    matched: share of targets assigned their own upload (Hungarian, one upload each); chance is 1 / uploads.
    top: share whose own upload is among the `flagged` best scored; chance is flagged / uploads.
    tpr: share of true pairs scored above all but at most 1 % of the false pairs.
    """

    rule: Rule
    matched: float
    top: float
    flagged: int
    tpr: float
    chance_matched: float
    chance_top: float
    targets: int
    uploads: int


def gradient_scores(
    uploads: Sequence[CapturedUpload],
    probes: Sequence[tuple[Tensor, Tensor]],
    model_fn: ModelFn,
    state: Mapping[str, Tensor],
    knowledge: Knowledge,
) -> Tensor:
    """Return scores (targets, uploads) by rule "gradient": cosines of effective gradients and the targets' probe gradients.

    probes: per target images (n, *shape) in the model's units and labels (n,).
    """
    seen = read(uploads, model_fn, state, knowledge)
    expected = torch.stack([gradient(seen[0].module, x, y).detach() for x, y in probes])
    return torch.stack([_alignment(expected, target) for target in seen], 1)


def _alignment(expected: Tensor, target: Target) -> Tensor:
    root = torch.ones(()) if target.weight is None else target.weight.sqrt()
    return F.normalize(expected * root, dim=1) @ F.normalize(target.gradient * root, dim=0)


def inversion_scores(module: nn.Module, probes: Sequence[tuple[Tensor, Tensor]], images: Iterable[Tensor]) -> Tensor:
    """Return scores (targets, uploads) of rule "inversion": minus the least feature distance of reconstructions and probes.

    Features are those of the penultimate layer of `module`, the model of the round. images: reconstructed from each upload alone.
    """
    own = [features(module, x) for x, _ in probes]
    found = (features(module, x) for x in images)
    return torch.stack([torch.stack([-torch.cdist(f, each).min() for f in own]) for each in found], 1)


def identify(scores: Tensor, owners: Sequence[int], rule: Rule, flagged: int = 10, seed: int = 0) -> Identification:
    """Evaluate scores (targets, uploads) against the truth: `owners[i]` is the index of target i's upload.

    The uploads are shuffled by `seed` first, so that ties are broken at random.
    Raises ConfigError for shapes that do not fit or scores that are not finite.
    """
    table: NDArray[np.float64] = scores.double().numpy()
    if table.ndim != 2 or len(owners) != len(table) or not all(0 <= o < table.shape[1] for o in owners):
        raise ConfigError(f"scores of shape {table.shape} do not fit {len(owners)} owners; give (targets, uploads)")
    if not np.isfinite(table).all() or table.shape[1] < len(owners):
        raise ConfigError("scores must be finite, and there must be at least one upload per target")
    order = np.random.default_rng(seed).permutation(table.shape[1])
    table, owners = table[:, order], [int(np.flatnonzero(order == o)[0]) for o in owners]
    rows, columns = linear_sum_assignment(table, maximize=True)
    truth = np.zeros(table.shape, dtype=bool)
    truth[np.arange(len(owners)), list(owners)] = True
    flagged = min(flagged, table.shape[1])
    best = np.argsort(-table, axis=1, kind="stable")[:, :flagged]
    return Identification(
        rule=rule,
        matched=float(np.mean([owners[int(r)] == c for r, c in zip(rows, columns, strict=True)])),
        top=float(np.mean([owners[i] in best[i] for i in range(len(owners))])),
        flagged=flagged,
        tpr=tpr_at(table[truth], table[~truth], 0.01),
        chance_matched=1 / table.shape[1],
        chance_top=flagged / table.shape[1],
        targets=len(owners),
        uploads=table.shape[1],
    )


def tpr_at(positive: NDArray[np.float64], negative: NDArray[np.float64], fpr: float) -> float:
    """Return the share of positive scores strictly above a threshold that at most `fpr` of the negative scores exceed."""
    allowed = int(np.floor(fpr * len(negative)))
    if len(negative) == 0:
        raise ConfigError("a false positive rate needs negative scores")
    threshold = np.sort(negative)[::-1][allowed] if allowed < len(negative) else -np.inf
    return float(np.mean(positive > threshold))
