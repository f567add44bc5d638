"""Scores of a run's models: on the public test set, by client, and the score by which a run is chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from fedveil.errors import ConfigError, FedveilError
from fedveil.federation.evidence import estimated_statistics, evidence, own_score
from fedveil.federation.history import Record
from fedveil.federation.private_code import found_by
from fedveil.federation.server import shows_models
from fedveil.mechanism.plan import Plan
from fedveil.training.local import HasPersonalModel
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fedveil.federation.clients import Clients
    from fedveil.federation.history import Row
    from fedveil.federation.progress import Federation, Progress
    from fedveil.federation.round import Context
    from fedveil.tasks.task import Evidence, Task
    from fedveil.training.params import FlatModel


DECAY = 0.9
"""Of the exponential moving average: what is left of a model's weight a round later."""


def average_in(federation: Federation, progress: Progress) -> None:
    """Take the model after the coming round's step into the average, in float64."""
    s, kind, average = federation.setting, federation.setting.final_model, progress.average
    if kind == "last" or (kind == "tail" and progress.round < s.rounds - s.tail_rounds):
        return
    decay = 1.0 if kind == "tail" else DECAY
    total = average.get("total", torch.zeros_like(progress.model, dtype=torch.float64))
    progress.average = {"total": decay * total + progress.model, "weight": decay * average.get("weight", 0.0) + 1.0}


def final_model(progress: Progress) -> Tensor:
    """The model [d] that the run would hand over now."""
    if not progress.average:
        return progress.model
    found: Tensor = (progress.average["total"] / progress.average["weight"]).to(progress.model.dtype)
    return found


def _require_finite(task: Task, model: FlatModel, found: Evidence, loss: float) -> None:
    """Refuse a score of what is no number; public: a model that was released, on public examples."""
    name, kept = type(model.module).__name__, [part for part in found if part.is_floating_point()]
    wrong = [part for part in kept if not bool(part.isfinite().all())]
    if wrong:
        raise FedveilError(
            f"model: the output of {name} on the test set is NaN or infinite: if training diverged, lower training.optimizer.lr "
            f"or privacy.noise_multiplier; else look for a division by zero or a logarithm in its forward"
        )
    if len(found[0]) and math.isnan(loss):
        raise FedveilError(
            f"task.name = {task.name!r}: the loss on the test set is NaN, and all outputs of {name} are finite: look for a "
            f"logarithm, or a division by zero, in the task"
        )


def global_model(federation: Federation, progress: Progress) -> FlatModel:
    """Return the network, loaded with the global model as it is now, and with its batch statistics."""
    model = federation.context.model
    model.load(progress.model)
    model.load_buffers(federation.context.buffers if progress.buffers is None else progress.buffers)
    return model


def handed_over(federation: Federation, progress: Progress) -> FlatModel:
    """Return the network as the run would hand it over now: every score of a run is that of this model."""
    model = global_model(federation, progress)
    model.load(final_model(progress))
    return model


def public_statistics(federation: Federation, progress: Progress) -> Tensor | None:
    """The batch statistics on the public split of the model that would be handed over now.

    None without such a split or such layers, and where the model has diverged.
    """
    public = federation.public
    if public is None or len(public[1]) < 2 or not federation.context.buffers.numel():
        return None
    found = estimated_statistics(handed_over(federation, progress), public[0])
    return found if bool(found.isfinite().all()) else None


def evaluate(federation: Federation, progress: Progress) -> Record:
    """Scores of the model that the run would hand over now on the public test set and on the clients' own test sets."""
    model = handed_over(federation, progress)
    task, tests = federation.context.task, federation.client_tests
    with torch.no_grad():
        scores = public_scores(task, model, *federation.test)
        row = {} if tests is None else {f"client_{task.main.name}": _client_scores(federation, model, tests)}
        row |= _personal_scores(federation, progress)
    return Record(scores, row) if shows_models(federation.setting) else Record({}, scores | row)


def public_scores(task: Task, model: FlatModel, x: Tensor, y: Tensor) -> Row:
    """Return loss and metrics of a model that was released on the public test set."""
    found = evidence(task, model, x, y)
    _require_finite(task, model, found, loss := task.test_loss(*found))
    return {"test_loss": loss} | {f"test_{k}": v for k, v in task.scores(*found).items()}


def _client_scores(federation: Federation, model: FlatModel, tests: Clients) -> list[float | None]:
    """The main metric of each client; of none where the network fails on these examples: how a run ends is seen by all."""
    none: list[float | None] = [None] * len(tests)
    context = federation.context
    if not len(tests.y):
        return none

    def scores() -> list[float | None]:
        return context.task.client_scores(tests.offsets, *evidence(context.task, model, tests.x, tests.y))

    return found_by(scores, context) or none


def _personal_scores(federation: Federation, progress: Progress) -> Row:
    """The main metric of the clients' own models (see `HasPersonalModel`), on their own tests and on the test set on average.

    None where a client's own model cannot be made, or fails: how a run ends is seen by all.
    """
    objective, task, tests = federation.context.objective, federation.context.task, federation.client_tests
    whole = federation.personal_on_test_set
    if not isinstance(objective, HasPersonalModel) or (tests is None and not whole):
        return {}
    each: list[float | None] = []
    on_test_set: list[float | None] = []
    for c in range(len(federation.context.clients)):
        own = [] if tests is None else [tests.examples(c)]
        examples = [*own, *([federation.test] if whole else [])]
        scores = found_by(partial(_own_scores, federation, progress, c, examples), federation.context) or [None] * len(examples)
        each += scores[: len(own)]
        on_test_set += scores[len(own) :]
    row: Row = {} if tests is None else {f"personal_{task.main.name}": each, f"mean_personal_{task.main.name}": _mean(each)}
    return row | ({f"mean_personal_test_{task.main.name}": _mean(on_test_set)} if whole else {})


def _own_scores(
    federation: Federation, progress: Progress, client: int, examples: Sequence[tuple[Tensor, Tensor]]
) -> list[float | None]:
    """The main metric of the client's own model on each of these sets of examples; None where it fails there."""
    objective, state, context = federation.context.objective, progress.privates.get(client, {}), federation.context
    assert isinstance(objective, HasPersonalModel)
    model = global_model(federation, progress)
    model.load(objective.personal(progress.model.clone(), state))  # of a copy: what it changes there is nobody else's
    if "buffers" in state:
        model.load_buffers(state["buffers"])
    here = replace(context, isolation="none")  # this is in a process of its own already, if any is
    return [found_by(partial(own_score, context.task, model, *given), here) for given in examples]


def _mean(scores: Sequence[float | None]) -> float:
    """Of those that are known; NaN where none is."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else math.nan


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
