"""Which client sent which intercepted upload.

After the empirical study of membership inference in "Convergent Differential Privacy Analysis for General Federated Learning"
(table 11). The attacker has probe images of some target clients and sees unlabelled uploads. The published matching is not
specified; rule "inversion" reconstructs an example from each upload and compares features, rule "gradient" (cheaper and
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

from fedveil.attacks.attack_types import CapturedUpload, Knowledge, ModelFn
from fedveil.attacks.features import features
from fedveil.attacks.matching import Target, read
from fedveil.attacks.simulate import gradient
from fedveil.errors import ConfigError

Rule = Literal["inversion", "gradient"]


@dataclass(frozen=True)
class Identification:
    """How well targets were found among the uploads.

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
    """Rule "gradient": cosine between each effective gradient and the gradient on each target's probes, (targets, uploads).

    probes: per target images (n, *shape) in the model's units and labels (n,).
    """
    seen = read(uploads, model_fn, state, knowledge)
    expected = torch.stack([gradient(seen[0].module, x, y).detach() for x, y in probes])
    return torch.stack([_alignment(expected, target) for target in seen], 1)


def _alignment(expected: Tensor, target: Target) -> Tensor:
    root = torch.ones(()) if target.weight is None else target.weight.sqrt()
    return F.normalize(expected * root, dim=1) @ F.normalize(target.gradient * root, dim=0)


def inversion_scores(module: nn.Module, probes: Sequence[tuple[Tensor, Tensor]], images: Iterable[Tensor]) -> Tensor:
    """Rule "inversion": minus the least distance of features between reconstructions and probes, (targets, uploads).

    Features are those of the penultimate layer of `module`, the model of the round. images: reconstructed from each upload alone.
    """
    own = [features(module, x) for x, _ in probes]
    found = (features(module, x) for x in images)
    return torch.stack([torch.stack([-torch.cdist(f, each).min() for f in own]) for each in found], 1)


def identify(scores: Tensor, owners: Sequence[int], rule: Rule, flagged: int = 10, seed: int = 0) -> Identification:
    """Judge scores (targets, uploads) against the truth: `owners[i]` is the index of target i's upload.

    The uploads are put in an order drawn from `seed` first, so that ties between them are broken by chance.
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
    """Share of positive scores strictly above a threshold that at most `fpr` of the negative scores exceed."""
    allowed = int(np.floor(fpr * len(negative)))
    if len(negative) == 0:
        raise ConfigError("a false positive rate needs negative scores")
    threshold = np.sort(negative)[::-1][allowed] if allowed < len(negative) else -np.inf
    return float(np.mean(positive > threshold))
