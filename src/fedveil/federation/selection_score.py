"""The score by which a run is chosen: the clients' mean score on examples of their own, through the door with noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedveil.errors import ConfigError
from fedveil.federation.evaluate import handed_over
from fedveil.federation.evidence import own_score
from fedveil.federation.private_code import found_by
from fedveil.mechanism.plan import Plan
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.progress import Federation, Progress
    from fedveil.federation.round import Context
    from fedveil.tasks.task import Task
    from fedveil.training.params import FlatModel

_MIDDLE = 0.5
"""Scores are shares, and leave as their distance from here, so that one client moves the sum by at most this."""


def check_score(task: Task, *, tests: bool) -> None:
    """Refuse a task whose main metric is no share of right answers, and clients without examples to score on.

    Raises:
        ConfigError: with what to set.
    """
    if not tests:
        raise ConfigError(
            "privacy.selection.score_noise scores each run on examples that clients keep from training, and there are none: set "
            "data.client_test_fraction, such as 0.2"
        )
    if not task.main.share or task.main.sign < 0:
        raise ConfigError(
            f"privacy.selection.score_noise: the main metric of task.name = {task.name!r} is {task.main.phrase}, and a score "
            f"with noise is a share that is better where it is higher, such as accuracy: use public data (fedveil tune --on)"
        )


def release_score(federation: Federation, progress: Progress) -> float | None:
    """The noisy mean score of the model that is handed over, charged to the run; None where the run has no such score.

    Each client scores by itself. One without examples to score on, or whose examples the network fails on, counts in the middle,
    as one whose contribution is zeroed does: a failure of the run would be seen.
    """
    s, context, tests = federation.setting, federation.context, federation.client_tests
    if s.selection is None or s.selection.score_noise is None:
        return None
    check_score(s.task, tests=tests is not None)
    assert tests is not None
    model = handed_over(federation, progress)
    plan = Plan(clip=_MIDDLE, noise_std=_MIDDLE * s.selection.score_noise, place="sum")
    door = context.door.beside(Layout(("score",), ((1,),)))
    away = [_away(context, model, *tests.examples(client)) for client in range(len(tests))]
    sealed = [door.seal(distance, plan, client, s.rounds) for client, distance in enumerate(away)]
    return _MIDDLE + float(door.release_sum(sealed, plan, s.rounds, len(tests)).vector[0])


def _away(context: Context, model: FlatModel, x: Tensor, y: Tensor) -> Tensor:
    """How far from the middle a client's own score is [1]."""
    score = found_by(lambda: own_score(context.task, model, x, y), context)
    return torch.tensor([0.0 if score is None else score - _MIDDLE])
