"""Counts on the clients' own test examples: which runs can release them, and what a statement says of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedveil.accounting.formatting import number
from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.methods.base import Fixed

if TYPE_CHECKING:
    from fedveil.accounting.types import Guarantee
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting


def check_evaluation(method: Method, s: Setting, proven: Guarantee) -> None:
    """Refuse counts beside releases that have no noise of their own to share with them.

    Args:
        proven: in the run's own view.

    Raises:
        ConfigError: with what to choose instead.
    """
    if s.evaluation is None:
        return
    main = s.task.main
    if not main.share or main.sign < 0:
        raise ConfigError(
            f"privacy.evaluation counts right answers, and the main metric of task.name = {s.task.name!r} is {main.phrase}: "
            f"leave it out, or choose a task whose main metric is a share, such as accuracy"
        )
    if s.scope.view is View.FINAL:
        raise ConfigError(
            "privacy.evaluation with privacy.view = 'final': the counts of each round are seen, and that view speaks of the last "
            "model alone: set privacy.view = 'aggregate' or 'server'"
        )
    if s.example_clip is not None:
        raise ConfigError(
            "privacy.evaluation with training.local = 'dp-sgd': noise is added inside training, and counts would leave without "
            "any: leave one of them out"
        )
    if math.isinf(proven.epsilon):
        raise ConfigError(
            f"privacy.evaluation: nothing is proven of this run ({proven.reason or 'epsilon is infinite'}), so that counts would "
            f"not be protected: leave it out, or set privacy.epsilon and a variant that is proven"
        )
    release = method.release(s)
    if isinstance(release, Fixed) and release.always.mechanism.stateful:
        raise ConfigError(
            f"privacy.evaluation: the noise of {method.name} is correlated over the rounds, and counts of a round need noise of "
            f"their own: leave it out, or choose another method"
        )


def evaluation_note(s: Setting) -> list[str]:
    """What leaves beside each update, and at what price."""
    if s.evaluation is None:
        return []
    counts = f"these counts are {number(100 * s.evaluation.share)} % of its mu^2"
    return [
        f"each release holds how many of a client's own test examples the global model gets right and how many wrong, of at most "
        f"{s.evaluation.examples}: {counts}, and the noise of the update is {number(s.update_noise)} times as large for it"
    ]
