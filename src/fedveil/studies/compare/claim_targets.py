"""Configurations at a wanted claimed epsilon: the paper's own parameter is searched until the paper's theorem gives it."""

from __future__ import annotations

import math

from scipy.optimize import brentq

from fedveil.configuration.config import Config
from fedveil.configuration.public_setting import calibrated_setting
from fedveil.errors import ConfigError

CLOSE = 1e-3
"""Claims this near to each other, relatively, count as equal."""
TIMES = 10
"""privacy.epsilon is searched up to 4 ** TIMES above or below the wanted claim."""


def at_claim(config: Config, epsilon: float) -> Config:
    """The configuration whose claim is `epsilon`; where there is no claim beside the proof, the one that proves it.

    `privacy.epsilon` of a published variant is what its paper calls epsilon (of a round, of a step, of the whole run), so that
    the claim of the run can differ from it.

    Raises:
        ConfigError: the claim does not follow privacy.epsilon, or jumps over the wanted one.
    """
    first = _claimed(config, epsilon)
    if first is None or math.isclose(first, epsilon, rel_tol=CLOSE):
        return _at(config, epsilon)
    bracket = _bracket(config, epsilon, first)
    if bracket is not None:
        found = math.exp(float(brentq(lambda x: _gap(config, x, epsilon), *bracket, rtol=1e-9)))
        if math.isclose(_claimed(config, found) or 0.0, epsilon, rel_tol=CLOSE):
            return _at(config, found)
    raise ConfigError(
        f"no privacy.epsilon was found at which the paper claims {epsilon:g}: "
        f"at privacy.epsilon = {epsilon:g} it claims {first:.4g}, and it does not follow"
    )


def _bracket(config: Config, epsilon: float, first: float) -> tuple[float, float] | None:
    """Logarithms of two values of privacy.epsilon, one with a claim below the wanted and one above; None where none is found."""
    start = math.log(epsilon)
    step = -1 if first > epsilon else 1
    for times in range(1, TIMES + 1):
        other = start + step * times * math.log(4)
        if _gap(config, other, epsilon) * step >= 0:
            return other - step * math.log(4), other
    return None


def _gap(config: Config, log: float, epsilon: float) -> float:
    """How far the claim lies above the wanted one, in logarithms."""
    claimed = _claimed(config, math.exp(log)) or 0.0
    return math.log(max(claimed, 1e-300)) - math.log(epsilon)


def _claimed(config: Config, epsilon: float) -> float | None:
    method, setting = calibrated_setting(_at(config, epsilon))
    claim = method.claim(setting)
    return None if claim is None else claim.epsilon


def _at(config: Config, epsilon: float) -> Config:
    section = config.privacy.model_copy(update={"epsilon": epsilon, "noise_multiplier": None})
    return config.model_copy(update={"privacy": section})
