"""The options of FedGLP-ADP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from fedveil.methods.base import MethodConfig, Variant


class FedGLPOptions(MethodConfig):
    """Layer-wise personalisation, with clip weights that follow the trend of each layer.

    In the paper's letters, p is `growth`, T is `training.rounds`, n is `training.clients_per_round`.

    Args:
        variant: published or proven.
        clip: C, L2 bound on a whole update.
        lambda1: weight of the pull towards the round's first personal weights. Not stated in the paper; FedDPA's value.
        lambda2: weight of the pull of the shared update's norm towards C. Not stated in the paper; FedDPA's value.
        clipping: `layers`, weighted clips per layer and noise for each (ACNDP, Eqs. 13 to 16); `flat`, one clip C and noise
            sigma C / sqrt(n): DP-FedAvg + GLP, the middle row of the paper's Table 5.
        layers: what counts as a layer l, and L as their number: one of the `network` (weight and bias together: 4 in a CNN of two
            convolutions and two full layers), as the paper counts, or each of its `tensors` (8). None is `network` in the
            published variant; the proven one is by tensors always, as the door clips.
        gamma: step of the log-odds of the clip weights; 0 keeps them at the layers' shares of the parameters.
        beta0: personal share of each layer at sigma = sigma0. slope: a of beta = beta0 exp(a (sigma - sigma0)); 0 fixes beta.
        sigma0: reference noise multiplier; None is that of epsilon = 6 in the same run.
        growth: p, share of a layer that becomes personal in each round; None is beta / T. Not stated in the paper.
        max_beta: beta above this counts as this. Not in the paper, whose beta can pass 1.
        max_log_odds: log-odds stay within plus and minus this, so that every clip stays positive. Not in the paper.
        personal_model: what a client uses and is measured by: its model as its last local training left it, or the newest
            global model with its personal coordinates in it. Not stated in the paper, whose figures fit only the first.
        accountant: published; sigma by the accountant that the paper used, or by its Theorem 1.
        allocation: proven; noise proportional to the clips as in the paper, or with the least total energy at the same cost.
    """

    proven_defaults: ClassVar[Mapping[str, Any]] = {"gamma": 0.05, "beta0": 0.1, "slope": 0.0, "personal_model": "combined"}
    name: Literal["fedglp-adp"] = "fedglp-adp"
    variant: Variant = "proven"
    clip: float = Field(0.5, gt=0, allow_inf_nan=False)
    lambda1: float = Field(0.1, ge=0, allow_inf_nan=False)
    lambda2: float = Field(0.05, ge=0, allow_inf_nan=False)
    clipping: Literal["layers", "flat"] = "layers"
    layers: Literal["network", "tensors"] | None = None
    gamma: float = Field(0.4, ge=0, allow_inf_nan=False)
    beta0: float = Field(0.3, ge=0, lt=1)
    slope: float = Field(0.2, ge=0, allow_inf_nan=False)
    sigma0: float | None = Field(None, ge=0, allow_inf_nan=False)
    growth: float | None = Field(None, gt=0, le=1)
    max_beta: float = Field(0.9, ge=0, lt=1)
    max_log_odds: float = Field(20.0, gt=0, le=80)
    personal_model: Literal["trained", "combined"] = "trained"
    accountant: Literal["opacus", "theorem1"] = "opacus"
    allocation: Literal["equal", "least"] = "least"
