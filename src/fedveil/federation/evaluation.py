"""Scores of a run's models: on the public test set, per client, and the noisy score used to select a run."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from fedveil.errors import ConfigError, FedveilError
from fedveil.federation.evidence import client_score, estimated_statistics, evidence
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
"""Decay of the exponential moving average: the share of a model's weight that remains one round later."""


def average_in(federation: Federation, progress: Progress) -> None:
    """Add the model after the coming round's step to the running average, in float64."""
    s, kind, average = federation.setting, federation.setting.final_model, progress.average
    if kind == "last" or (kind == "tail" and progress.round < s.rounds - s.tail_rounds):
        return
    decay = 1.0 if kind == "tail" else DECAY
    total = average.get("total", torch.zeros_like(progress.model, dtype=torch.float64))
    progress.average = {"total": decay * total + progress.model, "weight": decay * average.get("weight", 0.0) + 1.0}


def final_model(progress: Progress) -> Tensor:
    """Return the model [d] that the run would release as final now."""
    if not progress.average:
        return progress.model
    average: Tensor = (progress.average["total"] / progress.average["weight"]).to(progress.model.dtype)
    return average


def _require_finite(task: Task, model: FlatModel, results: Evidence, loss: float) -> None:
    """Refuse non-finite outputs or loss; the error may be public, since a released model is scored on public examples."""
    name, floating = type(model.module).__name__, [part for part in results if part.is_floating_point()]
    wrong = [part for part in floating if not bool(part.isfinite().all())]
    if wrong:
        raise FedveilError(
            f"model: the output of {name} on the test set is NaN or infinite: if training diverged, lower training.optimizer.lr "
            f"or privacy.noise_multiplier; else look for a division by zero or a logarithm in its forward"
        )
    if len(results[0]) and math.isnan(loss):
        raise FedveilError(
            f"task.name = {task.name!r}: the loss on the test set is NaN, and all outputs of {name} are finite: look for a "
            f"logarithm, or a division by zero, in the task"
        )


def global_model(federation: Federation, progress: Progress) -> FlatModel:
    """Return the network with the current global model and its batch statistics loaded."""
    model = federation.context.model
    model.load(progress.model)
    model.load_buffers(federation.context.buffers if progress.buffers is None else progress.buffers)
    return model


def load_final_model(federation: Federation, progress: Progress) -> FlatModel:
    """Return the network with the final model loaded, as of now; all scores of a run are of this model."""
    model = global_model(federation, progress)
    model.load(final_model(progress))
    return model


def public_statistics(federation: Federation, progress: Progress) -> Tensor | None:
    """Return the final model's batch statistics on the public split.

    Return None without a public split or batch normalisation, and if the model has diverged.
    """
    public = federation.public
    if public is None or len(public[1]) < 2 or not federation.context.buffers.numel():
        return None
    statistics = estimated_statistics(load_final_model(federation, progress), public[0])
    return statistics if bool(statistics.isfinite().all()) else None


def evaluate(federation: Federation, progress: Progress) -> Record:
    """Return scores of the current final model on the public test set, if there is one, and on the clients' own test sets."""
    model = load_final_model(federation, progress)
    task, tests = federation.context.task, federation.client_tests
    with torch.no_grad():
        scores = public_scores(task, model, *federation.test) if len(federation.test[1]) else {}
        row = {} if tests is None else {f"client_{task.main.name}": _client_scores(federation, model, tests)}
        row |= _personal_scores(federation, progress)
    return Record(scores, row) if shows_models(federation.setting) else Record({}, scores | row)


def public_scores(task: Task, model: FlatModel, x: Tensor, y: Tensor) -> Row:
    """Return loss and metrics of a released model on the public test set."""
    results = evidence(task, model, x, y)
    _require_finite(task, model, results, loss := task.test_loss(*results))
    return {"test_loss": loss} | {f"test_{k}": v for k, v in task.scores(*results).items()}


def _client_scores(federation: Federation, model: FlatModel, tests: Clients) -> list[float | None]:
    """Return the main metric of each client; all None if the network fails, because a run's outcome is public."""
    none: list[float | None] = [None] * len(tests)
    context = federation.context
    if not len(tests.y):
        return none

    def scores() -> list[float | None]:
        return context.task.client_scores(tests.offsets, *evidence(context.task, model, tests.x, tests.y))

    return found_by(scores, context) or none


def _personal_scores(federation: Federation, progress: Progress) -> Row:
    """Return the main metric of the clients' personal models (see `HasPersonalModel`), on their own tests and on the test set.

    A score is None if a personal model cannot be made or fails, because a run's outcome is public.
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
    """Return the main metric of a client's personal model on each set of examples; None where the model fails."""
    objective, state, context = federation.context.objective, progress.privates.get(client, {}), federation.context
    assert isinstance(objective, HasPersonalModel)
    model = global_model(federation, progress)
    model.load(objective.personal(progress.model.clone(), state))  # a copy, so that changes to it affect no other client
    if "buffers" in state:
        model.load_buffers(state["buffers"])
    here = replace(context, isolation="none")  # this code already runs in a child process, if any
    return [found_by(partial(client_score, context.task, model, *given), here) for given in examples]


def _mean(scores: Sequence[float | None]) -> float:
    """Return the mean of the scores that are not None, or NaN."""
    defined = [score for score in scores if score is not None]
    return sum(defined) / len(defined) if defined else math.nan


_MIDDLE = 0.5
"""Centre of the scores, which are shares: released as distances from here, they bound one client's influence by this."""


def check_score(task: Task, *, tests: bool) -> None:
    """Refuse a task whose main metric is not a share to maximise, and data without client test sets.

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
    """Return the noisy mean score of the final model and charge it to the run; None if the run has no `score_noise`.

    Each client is scored separately. A client without test examples, or on whose examples the network fails, counts as the
    middle, as a zeroed contribution would: a failure of the run would reveal it.
    """
    s, context, tests = federation.setting, federation.context, federation.client_tests
    if s.selection is None or s.selection.score_noise is None:
        return None
    check_score(s.task, tests=tests is not None)
    assert tests is not None
    model = load_final_model(federation, progress)
    plan = Plan(clip=_MIDDLE, noise_std=_MIDDLE * s.selection.score_noise, place="sum")
    door = context.door.for_extra_vector(Layout(("score",), ((1,),)))
    away = [_away(context, model, *tests.examples(client)) for client in range(len(tests))]
    sealed = [door.seal(distance, plan, client, s.rounds) for client, distance in enumerate(away)]
    return _MIDDLE + float(door.release_sum(sealed, plan, s.rounds, len(tests)).vector[0])


def _away(context: Context, model: FlatModel, x: Tensor, y: Tensor) -> Tensor:
    """Return the distance of one client's score from the middle [1]."""
    score = found_by(lambda: client_score(context.task, model, x, y), context)
    return torch.tensor([0.0 if score is None else score - _MIDDLE])
