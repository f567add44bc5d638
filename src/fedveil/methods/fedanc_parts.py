"""FedANC's proven policy and published objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.adaptive import debiased_norms
from fedveil.methods.base import Policy, Setting, sum_noise
from fedveil.methods.fedanc_options import FedANCOptions
from fedveil.methods.lstm_controller import BETA, ranks, soft_mask_slope
from fedveil.tasks.task import Column
from fedveil.training.local import Local, Remembering, State, clip_

if TYPE_CHECKING:
    from torch import Tensor


REFERENCE = sum(BETA) / 2
"""The controller's beta that spends an even share of what is left of the budget."""


# --- proven ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budgeted(Policy):
    """Proven policy: the controller reads released values and public loss; its beta decides how fast the budget is spent.

    With B = T (f / z)^2 the budget in mu^2, a round costs mu^2 = (left of B / rounds left) (b_ref / b)^2, kept within `pace`; the
    last round costs what is left, so a client that is in every round spends B exactly. Poisson-sampled sums admit no filter
    for varying noise, so there mu = f / z always, and the controller sets only the share of coordinates.
    """

    method: FedANCOptions
    columns = (
        Column("beta", "Noise std / clip", public=True),
        Column("gamma", "Coordinates that may be sent", "coordinates", share=True, public=True),
        Column("controller_beta", "The controller's own noise std / clip", public=True),
        Column("mu2_spent", "Spent of the budget in μ²", "μ²", public=True),
    )

    def start(self, s: Setting) -> State:
        """A pre-trained controller that has seen nothing."""
        return self.method.controller.start() | {"norm": 0.0, "spent": 0.0, "rounds": 0, "releaser": 0, "beta": 0.0}

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        """Restrict to the support, clip to C, noise beta C."""
        method = self.method
        b, gamma = method.controller.act(state, state["norm"], seen.public_loss or 0.0)
        mu = self._mu(s, b, seen.round, state)
        movement = None if seen.previous is None else seen.model - seen.previous
        chosen = self._support(movement, math.ceil(gamma * s.layout.dimension), seen, state["releaser"])
        std = 0.0 if s.z == 0 else s.scope.update_factor * method.clip / mu
        return Plan(clip=method.clip, noise_std=std, support=chosen, place="sum" if sum_noise(s) else "upload")

    def observe(self, s: Setting, state: State, left: Upload) -> State:
        """One step of the controller on `tradeoff`, then remember what left."""
        method, layout = self.method, s.layout
        norm = float(debiased_norms(left, layout).norm())
        k = layout.dimension if left.support is None else int(left.support.sum())
        start = left.start if left.start is not None else left.vector
        movement = start - state["start"] if "start" in state else None
        noise = float(left.noise_std[0]) ** 2 * k / max(norm, 1e-6) ** 2
        b, gamma = method.controller.act(state, state["norm"], left.public_loss or 0.0)
        objective = partial(
            tradeoff, weight=method.budget_weight, noise=noise / (b**2 * gamma), captured=captured(movement, gamma)
        )
        new = method.controller.learn(state, state["norm"], left.public_loss or 0.0, objective)
        std = float(left.plan.noise_std)
        spent = state["spent"] + (s.scope.update_factor * method.clip / std) ** 2 if std else 0.0
        return {
            **new,
            "norm": norm,
            "spent": spent,
            "rounds": state["rounds"] + 1,
            "releaser": left.client + 1,
            "beta": std / method.clip,
            "start": start,
        }

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Noise std / clip and share of coordinates of the last release; the controller's own beta; mu^2 spent."""
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
        most = 0.9 * left if rounds > 1 else left  # something must be left for the rounds to come
        return math.sqrt(min(left / max(rounds, 1) * pace, most))

    def _support(self, movement: Tensor | None, k: int, seen: Released, releaser: int) -> Tensor:
        """The k coordinates to send [d]: those that the global model moved most, and some at random."""
        import torch

        from fedveil.release.noise import Randomness

        derive = Randomness(self.method.controller_seed).derive("support", seen.round, releaser)
        chosen = torch.zeros_like(seen.model, dtype=torch.bool)
        known = 0 if movement is None else k - math.ceil(self.method.exploration * k)
        if movement is not None:
            chosen[movement.abs().topk(known).indices] = True
        draw = torch.rand(len(chosen), generator=torch.Generator().manual_seed(derive)).masked_fill(chosen, -1.0)
        chosen[draw.topk(k - known).indices] = True
        return chosen


def captured(movement: Tensor | None, gamma: float) -> tuple[float, float]:
    """Share of the squared movement in its largest `gamma` d coordinates, and the slope of that share in gamma.

    Without any movement it is taken to be flat: (gamma, 1).
    """
    squares = None if movement is None else movement.square().sort(descending=True).values.double()
    if squares is None or not float(squares.sum()):
        return gamma, 1.0
    k = min(math.ceil(gamma * len(squares)), len(squares))
    total = float(squares.sum())
    return float(squares[:k].sum()) / total, float(squares[k - 1]) * len(squares) / total


def tradeoff(b: Tensor, gamma: Tensor, *, weight: float, noise: float, captured: tuple[float, float]) -> Tensor:
    """log of the relative squared error of a release + weight (cost / even share - 1)^2.

    The error is what the support leaves out, 1 - captured(gamma), and the noise, `noise` b^2 gamma. `captured` is linear about
    the present gamma. Stands in for the prediction loss, whose gradient is private.
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
    optimisers the step's dependence on the gradient is taken to be eta. The last batch of a round teaches the budget only.
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
        """The coordinates that got noise at least once; the others are not sent."""
        self._learn(local, None)
        update: Tensor = (local.model.vector - local.start) * local.scratch["mask"]
        return update

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Last outputs, and the paper's epsilon of the last step."""
        return {"beta": state["b"], "gamma": state["gamma"], "claimed_epsilon": state["claimed"]}

    def _learn(self, local: Local, gradient: Tensor | None) -> None:
        """The lesson of the previous step, now that the gradient after it is known."""
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
        """One step of the controller."""
        slopes = (0.0, 0.0) if gradient is None else (float(gradient @ by[0]), float(gradient @ by[1]))

        def objective(beta: Tensor, gamma: Tensor) -> Tensor:
            budget = (claim(beta, gamma) - self.target).square()
            return slopes[0] * beta + slopes[1] * gamma + self.method.budget_weight * budget

        local.state.update(self.method.controller.learn(local.state, feedback[0], feedback[1], objective))


def estimate(beta: Tensor, gamma: Tensor, *, dimension: int, delta: float) -> Tensor:
    """The paper's epsilon of a step, sqrt(2 gamma d ln(1.25 / delta)) / beta (Eq. 10), as a tensor."""
    return (2 * dimension * math.log(1.25 / delta) * gamma).sqrt() / beta
