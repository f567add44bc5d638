"""FedANC: an LSTM on each client sets the amount of noise and the share of noised coordinates.

Published: the largest coordinates of each raw gradient get noise, the others get none, and the resulting local model is uploaded,
so nothing can be proven. Proven: support, noise and share are computed from releases before the round; the update is restricted,
clipped and noised once. Sparsity then lowers the noise at unchanged cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fedveil.accounting._numbers import at_least, open_probability, positive, probability
from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.base import CoverageMean, Policy, Release, Setting, Unproven, reads_public_split, sum_noise, what_is_not_zero
from fedveil.methods.shared import TwoVariants, debiased_norms, paper_epsilon
from fedveil.papers.fedanc.lstm_controller import BETA, Controller, ranks, soft_mask_slope
from fedveil.tasks.task import Column
from fedveil.training.local import Client, Local, Plain, Remembering, State, clip_

if TYPE_CHECKING:
    from torch import Tensor


def claimed_epsilon(beta: float, gamma: float, dimension: int, delta: float) -> float:
    """Return sqrt(2 gamma d ln(1.25 / delta)) / beta, the claim for one step, which assumes a wrong sensitivity C sqrt(gamma d).

    Args:
        beta: noise std / clip, > 0. gamma: share of coordinates noised, in (0, 1]. dimension: d. delta: in (0, 1).

    Source: FedANC, Theorem 2 and equation (10).
    """
    share = positive("gamma", probability("gamma", gamma)) * at_least("dimension", dimension, 1)
    return math.sqrt(2 * share * math.log(1.25 / open_probability("delta", delta))) / positive("beta", beta)


def release_mu(beta: float, rounds: int = 1, adjacency: Adjacency = Adjacency.REPLACE_ONE, *, aggregated: int = 1) -> float:
    """Return the true mu of `rounds` uploads noised once with std beta C on a support fixed beforehand: f sqrt(T / n) / beta.

    Sparsity does not matter: the clipped update has norm at most C on any support. It lowers the norm of the noise.

    Args:
        beta: noise std / clip, > 0. rounds: T >= 0. adjacency: f = 2 (replace-one) or 1 (zero-out).
        aggregated: number n of uploads that the adversary sees only as a sum (1: the server view).
    """
    share = at_least("rounds", rounds, 0) / at_least("aggregated", aggregated, 1)
    return adjacency.factor * math.sqrt(share) / positive("beta", beta)


class FedANCOptions(TwoVariants):
    """A learned controller sets the amount of noise and the share of noised coordinates.

    The paper's epsilon_target is `privacy.epsilon` of the published variant.

    Args:
        variant: published or proven.
        clip: C, bound on each gradient (published) or on the whole update (proven). Not stated in the paper.
        gamma_min, gamma_max: range of the share of coordinates.
        budget_weight: lambda, weight of the budget term in the controller's loss. Not stated in the paper for its main results.
        controller_lr, pretraining_steps, dropout: of the controller. Not stated in the paper.
        controller_seed: public seed of the controller's initial weights and of the proven variant's exploration.
        beta, gamma: published; constants that replace the controller's outputs, for a static baseline. Not in the paper.
        width: published; of the sigmoid through which gamma gets a gradient from the mask. Not stated in the paper.
        exploration: proven; share of the support that is random; the rest follows the last movement of the global model.
        pace: proven; a round spends between 1 / pace and pace times an even share of the remaining budget, the last one all.
    """

    proven_defaults: ClassVar[Mapping[str, Any]] = {"gamma_min": 0.8}
    name: Literal["fedanc"] = "fedanc"
    proven_difference: ClassVar[str] = (
        "coordinates, noise and share are computed from releases before the round, and the update is restricted to these "
        "coordinates, clipped and noised once"
    )
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
        """Beta and gamma if they are constants."""
        return None if self.beta is None or self.gamma is None else (self.beta, self.gamma)

    @property
    def controller(self) -> Controller:
        """The initial controller of each client."""
        c = self.controller_lr, self.pretraining_steps, self.dropout, self.controller_seed
        return Controller(self.gamma_min, self.gamma_max, *c)


REFERENCE = sum(BETA) / 2
"""The controller's beta that spends an even share of the remaining budget."""


# --- proven ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budgeted(Policy):
    """Proven policy: the controller reads released values and public loss; its beta decides how fast the budget is spent.

    B = T (f / z)^2 is the budget in mu^2. A round costs mu^2 = (remaining B / remaining rounds) (b_ref / b)^2, limited by `pace`;
    the last round costs the remainder, so a client that is in every round spends exactly B. For Poisson-sampled sums there is no
    filter for varying noise; then mu = f / z in every round, and the controller sets only the share of coordinates.
    """

    method: FedANCOptions
    columns = (
        Column("beta", "Noise std / clip", public=True),
        Column("gamma", "Coordinates that may be sent", "coordinates", share=True, public=True),
        Column("controller_beta", "The controller's own noise std / clip", public=True),
        Column("mu2_spent", "Spent of the budget in μ²", "μ²", public=True),
    )

    def start(self, s: Setting) -> State:
        """Return the state with a pre-trained controller and empty memory."""
        return self.method.controller.start() | {"norm": 0.0, "spent": 0.0, "rounds": 0, "releaser": 0, "beta": 0.0}

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Restrict to the support, clip to C, noise beta C."""
        method = self.method
        b, gamma = method.controller.act(state, state["norm"], released.public_loss or 0.0)
        mu = self._mu(s, b, released.round, state)
        movement = None if released.previous is None else released.model - released.previous
        chosen = self._support(movement, math.ceil(gamma * s.layout.dimension), released, state["releaser"])
        std = 0.0 if s.z == 0 else s.scope.update_factor * method.clip / mu
        return Plan(clip=method.clip, noise_std=std, support=chosen, place="sum" if sum_noise(s) else "upload")

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Take one step of the controller on `tradeoff`, then store the release."""
        method, layout = self.method, s.layout
        norm = float(debiased_norms(upload, layout).norm())
        k = layout.dimension if upload.support is None else int(upload.support.sum())
        start = upload.start if upload.start is not None else upload.vector
        movement = start - state["start"] if "start" in state else None
        noise = float(upload.noise_std[0]) ** 2 * k / max(norm, 1e-6) ** 2
        b, gamma = method.controller.act(state, state["norm"], upload.public_loss or 0.0)
        objective = partial(
            tradeoff, weight=method.budget_weight, noise=noise / (b**2 * gamma), captured=captured(movement, gamma)
        )
        new = method.controller.learn(state, state["norm"], upload.public_loss or 0.0, objective)
        std = float(upload.plan.noise_std)
        spent = state["spent"] + (s.scope.update_factor * method.clip / std) ** 2 if std else 0.0
        return {
            **new,
            "norm": norm,
            "spent": spent,
            "rounds": state["rounds"] + 1,
            "releaser": upload.client + 1,
            "beta": std / method.clip,
            "start": start,
        }

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Return noise std / clip and share of coordinates of the last release, the controller's beta, and spent mu^2."""
        return {"beta": state["beta"], "gamma": state["gamma"], "controller_beta": state["b"], "mu2_spent": state["spent"]}

    def _mu(self, s: Setting, b: float, round: int, state: State) -> float:
        method = self.method
        if s.z == 0:
            return math.inf
        even = s.scope.update_factor / s.z
        if sum_noise(s) and s.sampling == "poisson":
            return even
        left = max(s.participations * even**2 - state["spent"], 0.0)
        rounds = min(s.rounds - round, s.participations - (0 if sum_noise(s) else state["rounds"]))
        pace = min(max((REFERENCE / b) ** 2, 1 / method.pace), method.pace) if rounds > 1 else 1.0
        most = 0.9 * left if rounds > 1 else left  # the remaining rounds need a budget, too
        return math.sqrt(min(left / max(rounds, 1) * pace, most))

    def _support(self, movement: Tensor | None, k: int, released: Released, releaser: int) -> Tensor:
        """Return a mask [d] of k coordinates: those that moved most in the global model, and random ones."""
        import torch

        from fedveil.release.noise import Randomness

        derive = Randomness(self.method.controller_seed).derive("support", released.round, releaser)
        chosen = torch.zeros_like(released.model, dtype=torch.bool)
        known = 0 if movement is None else k - math.ceil(self.method.exploration * k)
        if movement is not None:
            chosen[movement.abs().topk(known).indices] = True
        draw = torch.rand(len(chosen), generator=torch.Generator().manual_seed(derive)).masked_fill(chosen, -1.0)
        chosen[draw.topk(k - known).indices] = True
        return chosen


def captured(movement: Tensor | None, gamma: float) -> tuple[float, float]:
    """Return the share of the squared movement in its largest `gamma` d coordinates, and the derivative of that share by gamma.

    Without movement the result is (gamma, 1), as for a uniform movement.
    """
    squares = None if movement is None else movement.square().sort(descending=True).values.double()
    if squares is None or not float(squares.sum()):
        return gamma, 1.0
    k = min(math.ceil(gamma * len(squares)), len(squares))
    total = float(squares.sum())
    return float(squares[:k].sum()) / total, float(squares[k - 1]) * len(squares) / total


def tradeoff(b: Tensor, gamma: Tensor, *, weight: float, noise: float, captured: tuple[float, float]) -> Tensor:
    """Return log of the relative squared error of a release + weight (cost / even share - 1)^2.

    The error is the missing movement, 1 - captured(gamma), plus the noise, `noise` b^2 gamma; `captured` is linearised at the
    present gamma. It replaces the prediction loss, whose gradient is private.
    """
    share, slope = captured
    left_out = (1 - share - slope * (gamma - gamma.detach())).clamp_min(1e-6)
    return (left_out + noise * b.square() * gamma).log() + weight * ((REFERENCE / b).square() - 1).square()


# --- published ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseNoise(Remembering):
    """Published objective (Algorithm 1): at each step the controller sets beta and gamma; noise on the largest coordinates.

    The prediction loss of the next batch reaches beta through the step that beta noised,
    d loss / d beta = <gradient, -eta C M xi>, and gamma through the straight-through slope of M. Exact for plain SGD; for other
    optimisers the derivative of the step by the gradient is assumed to be eta. After the last batch of a round, only the budget
    term trains the controller.
    """

    method: FedANCOptions
    target: float
    delta: float
    columns = (
        Column("beta", "Noise std / clip"),
        Column("gamma", "Coordinates that may be sent", "coordinates", share=True),
        Column("claimed_epsilon", "The paper's ε of the last step", "ε"),
    )

    def begin(self, local: Local) -> None:
        import torch

        if self.method.constant is not None:
            local.state["b"], local.state["gamma"] = self.method.constant
        elif "weights" not in local.state:
            local.state.update(self.method.controller.start())
        local.scratch["mask"] = torch.zeros_like(local.start, dtype=torch.bool)

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Gradient, controller, clip, sparse noise, optimiser step."""
        loss, gradient, method = local.gradient(local, x, y), local.model.grad, self.method
        self._learn(local, gradient)
        feedback = float(gradient.norm()), float(loss)
        beta, gamma = method.constant or method.controller.act(local.state, *feedback)
        clip_(gradient, method.clip)
        rank = ranks(gradient.abs())
        mask = rank < math.ceil(gamma * len(gradient))
        noise = local.noise(len(gradient)) * method.clip
        eta = local.spec.learning_rate(local.round, local.step, local.steps)
        by_gamma = noise * soft_mask_slope(rank, gamma, method.width) * (-eta * beta)
        noise.mul_(mask)
        local.scratch["lesson"] = feedback, noise * -eta, by_gamma
        local.scratch["mask"] |= mask
        counts = gradient.new_tensor([float(part.sum()) for part in local.model.layout.split(mask)])
        local.noised_gradient(counts * (beta * method.clip) ** 2)
        gradient.add_(noise, alpha=beta)
        local.descend()
        return loss

    def finish(self, local: Local) -> Tensor:
        """Return the update on the coordinates that got noise at least once; the others are not sent."""
        self._learn(local, None)
        update: Tensor = (local.model.vector - local.start) * local.scratch["mask"]
        return update

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Return the controller's last outputs, and the epsilon that the paper claims for the last step."""
        return {"beta": state["b"], "gamma": state["gamma"], "claimed_epsilon": state["claimed"]}

    def _learn(self, local: Local, gradient: Tensor | None) -> None:
        """Train the controller on the previous step, whose effect the present gradient shows."""
        if "lesson" not in local.scratch:
            return
        feedback, by_beta, by_gamma = local.scratch.pop("lesson")
        claim = partial(estimate, dimension=len(local.start), delta=self.delta)
        if self.method.constant is None:
            self._descend(local, feedback, gradient, (by_beta, by_gamma), claim)
        outputs = (local.start.new_tensor(local.state[key]) for key in ("b", "gamma"))
        local.state["claimed"] = float(claim(*outputs))

    def _descend(
        self,
        local: Local,
        feedback: tuple[float, float],
        gradient: Tensor | None,
        by: tuple[Tensor, Tensor],
        claim: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Take one step of the controller."""
        slopes = (0.0, 0.0) if gradient is None else (float(gradient @ by[0]), float(gradient @ by[1]))

        def objective(beta: Tensor, gamma: Tensor) -> Tensor:
            budget = (claim(beta, gamma) - self.target).square()
            return slopes[0] * beta + slopes[1] * gamma + self.method.budget_weight * budget

        local.state.update(self.method.controller.learn(local.state, feedback[0], feedback[1], objective))


def estimate(beta: Tensor, gamma: Tensor, *, dimension: int, delta: float) -> Tensor:
    """Return the paper's epsilon of a step, sqrt(2 gamma d ln(1.25 / delta)) / beta (Eq. 10), as a tensor."""
    return (2 * dimension * math.log(1.25 / delta) * gamma).sqrt() / beta


class FedANC(FedANCOptions):
    __doc__ = FedANCOptions.__doc__
    reason: ClassVar[str] = (
        "the coordinates that get noise are the largest of each raw gradient, and the others move the model bare (FedANC)"
    )

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: the controller steers towards the configured epsilon."""
        if self.gamma_min >= self.gamma_max:
            raise ConfigError(f"method.gamma_min = {self.gamma_min:g} must be below method.gamma_max = {self.gamma_max:g}")
        if (self.beta is None) != (self.gamma is None) or (self.beta is not None and self.variant == "proven"):
            raise ConfigError("method.beta and method.gamma replace the controller of the published variant: give both, or none")
        return super().calibrate(s)

    def check_published(self, s: Setting) -> None:
        if sum_noise(s):
            raise ConfigError(
                "the published variant of fedanc sends each client's mask to the server: set privacy.view = 'server'"
            )
        self._target(s)

    def release(self, s: Setting) -> Release:
        """Proven: support, noise and share from releases. Published: the upload as training made it."""
        return Budgeted(self) if self.variant == "proven" else Unproven(("gradients", "losses"), self.unproven, what_is_not_zero)

    def client(self, s: Setting) -> Client:
        """Proven: plain training. Published: noise on part of each gradient."""
        return Plain() if self.variant == "proven" else SparseNoise(self, self._target(s), s.delta)

    def server(self, s: Setting) -> CoverageMean:
        """Eq. 13: per coordinate, the weighted mean over the clients that sent it; the others keep the global value."""
        return CoverageMean()

    def claim(self, s: Setting) -> Claim | None:
        """Return Theorem 2 for one step, with constants or the outputs at which pre-training aims."""
        if self.variant == "proven":
            return None
        beta, gamma = self.constant or (sum(BETA) / 2, (self.gamma_min + self.gamma_max) / 2)
        scope = Scope(Unit.RECORD, Adjacency.REPLACE_ONE, View.SERVER)
        steered = "" if self.constant else f"; the controller is steered towards {self._target(s):g}"
        note = f"one step at beta = {beta:g}, gamma = {gamma:g}{steered}"
        return Claim(claimed_epsilon(beta, gamma, s.layout.dimension, s.delta), s.delta, scope, "FedANC, Theorem 2", note)

    def _target(self, s: Setting) -> float:
        """Return the target epsilon of the published controller; 0 if there is none."""
        if self.constant is None:
            return paper_epsilon(s, self.name)
        if s.epsilon is not None:
            raise ConfigError("method.beta and method.gamma are constant, so nothing steers them: remove privacy.epsilon")
        return 0.0

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return the assumption about the data that the controller reads."""
        return reads_public_split(s) if self.variant == "proven" else ()
