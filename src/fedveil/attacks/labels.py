"""Labels from the gradient of the last layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedveil.attacks.attack_types import Bounds, Knowledge
from fedveil.attacks.matching import Target
from fedveil.errors import ConfigError


def last_layer(names: Mapping[str, Tensor]) -> tuple[str, str | None]:
    """Names of the classifier's weight and bias: the last matrix (2 dimensions) among the parameters."""
    matrices = [name for name, value in names.items() if name.endswith("weight") and value.ndim == 2]
    if not matrices:
        raise ConfigError("the model has no linear layer to read labels from; give Knowledge.labels")
    bias = matrices[-1].removesuffix("weight") + "bias"
    return matrices[-1], bias if bias in names else None


def class_gradient(target: Target) -> Tensor:
    """Gradient of the last bias (classes,), in which db_c = mean_i p_ic - n_c / n.

    Raises ConfigError when the model has no last bias or the upload does not carry it.
    """
    named = target.named()
    _, bias = last_layer(named)
    if bias is None:
        raise ConfigError("the last layer has no bias to read labels from; give Knowledge.labels")
    if not bool(named[bias].any()):
        raise ConfigError(f"{bias} was withheld; give Knowledge.labels")
    return named[bias]


def single_label(target: Target) -> int:
    """Label of one example: the class with the most negative last-bias gradient (Zhao et al. 2020, iDLG).

    Without a bias, the class whose row of the last weight's gradient has the smallest sum; that needs features >= 0.
    """
    named = target.named()
    weight, bias = last_layer(named)
    return int((class_gradient(target) if bias is not None else named[weight].sum(1)).argmin())


def mean_prediction(module: nn.Module, inputs: Tensor) -> Tensor:
    """Mean class probabilities of the model on `inputs`, (classes,)."""
    with torch.no_grad():
        mean: Tensor = module(inputs).softmax(1).mean(0)
    return mean


def label_counts(bias_gradient: Tensor, prediction: Tensor, n: int) -> Tensor:
    """How many of n examples each class has, int64 (classes,), summing to n.

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
    """How many of n examples each class has, from an upload; `inputs` are auxiliary data. Where the clip acted, it is undone."""
    gradient, prediction = class_gradient(target), mean_prediction(target.module, inputs)
    _, bias = last_layer(target.named())
    assert bias is not None
    return label_counts(gradient * (shrinkage(gradient, prediction, n) if target.clipped(bias) else 1), prediction, n)


def shrinkage(bias_gradient: Tensor, prediction: Tensor, n: int) -> float:
    """By what factor >= 1 a clip shrank db: the one at which the counts n (p_c - s db_c) come nearest to whole numbers.

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
    """The n classes with the smallest min_j dW[c, j], for batches without repeated labels (Yin et al. 2021).

    Raises ConfigError when n exceeds the number of classes.
    """
    named = target.named()
    smallest = named[last_layer(named)[0]].min(1).values
    if n > len(smallest):
        raise ConfigError(f"{n} examples cannot have unique labels among {len(smallest)} classes; use label counts")
    return smallest.topk(n, largest=False).indices.sort().values


def infer(target: Target, n: int, knowledge: Knowledge, bounds: Bounds, rng: torch.Generator) -> Tensor:
    """Labels of n examples, sorted, int64 (n,): the known ones, else the bias rule for one example, else label counts.

    Without auxiliary inputs the mean prediction is taken on 256 uniform random images.
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
