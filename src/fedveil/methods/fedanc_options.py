"""The options of FedANC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from fedveil.methods.lstm_controller import Controller
from fedveil.methods.two_variants import TwoVariants


class FedANCOptions(TwoVariants):
    """A learned controller sets the amount of noise and the share of coordinates that get it.

    epsilon_target of the published variant is `privacy.epsilon`.

    Args:
        variant: published or proven.
        clip: C; published, bound on each gradient; proven, on the whole update. Not stated in the paper.
        gamma_min, gamma_max: range of the share of coordinates.
        budget_weight: lambda, weight of the budget term in the controller's loss. Not stated in the paper for its main results.
        controller_lr, pretraining_steps, dropout: of the controller. Not stated in the paper.
        controller_seed: of the controller's first weights, and of the proven variant's exploration; public.
        beta, gamma: published; constants in place of the controller's outputs, as a static baseline has them. Not in the paper.
        width: published; of the sigmoid through which gamma gets a gradient from the mask. Not stated in the paper.
        exploration: proven; share of the support that is drawn at random, the rest follows the last global movement.
        pace: proven; a round may spend between 1 / pace and pace times an even share of what is left, the last one all of it.
    """

    proven_defaults: ClassVar[Mapping[str, Any]] = {"gamma_min": 0.8}
    name: Literal["fedanc"] = "fedanc"
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    gamma_min: float = Field(0.1, gt=0, lt=1)
    gamma_max: float = Field(0.9, gt=0, le=1)
    budget_weight: float = Field(1.0, ge=0, allow_inf_nan=False)
    controller_lr: float = Field(1e-3, gt=0, allow_inf_nan=False)
    pretraining_steps: int = Field(300, ge=0)
    dropout: float = Field(0.1, ge=0, lt=1)
    controller_seed: int = Field(0, ge=0)
    beta: float | None = Field(None, gt=0, allow_inf_nan=False)
    gamma: float | None = Field(None, gt=0, le=1)
    width: float = Field(0.05, gt=0, allow_inf_nan=False)
    exploration: float = Field(0.1, ge=0, le=1)
    pace: float = Field(1.5, ge=1, allow_inf_nan=False)

    @property
    def constant(self) -> tuple[float, float] | None:
        """Beta and gamma where they are constants."""
        return None if self.beta is None or self.gamma is None else (self.beta, self.gamma)

    @property
    def controller(self) -> Controller:
        """The controller that each client starts with."""
        c = self.controller_lr, self.pretraining_steps, self.dropout, self.controller_seed
        return Controller(self.gamma_min, self.gamma_max, *c)
