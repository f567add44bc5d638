"""What the published baselines of LaDP-FL share: the classical Gaussian mechanism on clipped training, round by round."""

from __future__ import annotations

from fedveil.accounting.gaussian import classical_noise_multiplier
from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.adaptive import paper_epsilon
from fedveil.methods.base import Setting
from fedveil.papers.ladp_fl.ladp_claim import claimed_total, sensitivity_theorem2


def training_reach(s: Setting, method: str, moves: int | None = None, *, momentum: bool = False) -> float:
    """2 eta M G_c: how far M SGD steps on gradients clipped to G_c can drive two models apart.

    Args:
        moves: M; None counts epochs, as LaDP-FL's Theorem 2 does.
        momentum: whether the method speaks of momentum mu too, whose velocity is at most G_c (1 + mu + mu^2 + ...): the reach is
            1 / (1 - mu) times as far.

    Raises:
        ConfigError: training that the bound does not speak of.
    """
    optimizer, clip = s.local.optimizer, s.local.batch_clip
    if clip is None or optimizer.name != "sgd" or optimizer.weight_decay or (optimizer.momentum and not momentum):
        steps, without = ("SGD steps", "weight_decay") if momentum else ("plain SGD steps", "momentum or weight_decay")
        raise ConfigError(
            f"the published variant of {method} bounds {steps} on clipped gradients: set training.batch_clip (G_c), "
            f"and training.optimizer to sgd without {without}"
        )
    return sensitivity_theorem2(optimizer.lr, s.local.epochs if moves is None else moves, clip) / (1 - optimizer.momentum)


def full_dp_std(s: Setting, method: str) -> float:
    """sqrt(2 ln(1.25 / delta)) 2 eta E G_c / epsilon, LaDP-FL's Full DP: the same noise on every weight in every round."""
    return classical_noise_multiplier(paper_epsilon(s, method), s.delta) * training_reach(s, method)


def classical_scope() -> Scope:
    """What the baselines claim: one record, replaced, against whoever sees the uploads."""
    return Scope(Unit.RECORD, Adjacency.REPLACE_ONE, View.SERVER)


def sequential_claim(s: Setting, total: float, source: str) -> Claim:
    """LaDP-FL's accountant: q times the sum of the rounds' epsilons at q T delta; one round's where that delta is 1 or more.

    Args:
        total: the sum of the rounds' epsilons. source: who says that a round has its epsilon.
    """
    scope = classical_scope()
    rate = min(1.0, s.local.batch_size / s.known_records)
    epsilon, delta = claimed_total(total / s.rounds, s.delta, s.rounds, rate)
    if delta >= 1:
        note = f"one round; over {s.rounds} rounds the paper's accountant gives epsilon = {epsilon:.4g} at a vacuous delta >= 1"
        return Claim(total / s.rounds, s.delta, scope, source, note)
    return Claim(epsilon, delta, scope, f"{source} and Section XIII", f"q T epsilon with q = {rate:.4g}")
