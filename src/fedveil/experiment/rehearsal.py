"""The rehearsal: before any release, a run is tried once on public examples, in a child process.

Problems of a user-defined network, task or method are thereby detected at no cost. Made-up clients with examples of the test set
go through a round: the forward pass, the loss, the gradient (of single examples if these are used), a last batch of one example,
the release, the server's step, all scores, and the content of a checkpoint. The code is that of a real round, with a ledger that
charges nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.errors import ConfigError
from fedveil.executors.batched import Batched
from fedveil.executors.inline import Inline
from fedveil.experiment.assembly import federation, public_examples, spec_for
from fedveil.experiment.child_process import in_child
from fedveil.experiment.public_values import TOGETHER
from fedveil.experiment.sections import Training
from fedveil.experiment.single_examples import check_single_examples
from fedveil.federation.clients import Clients
from fedveil.federation.evaluation import evaluate, release_score
from fedveil.federation.fit import begin_round, collect_outcomes, finish_round
from fedveil.federation.isolated import can_fork
from fedveil.federation.plain_state import tree_parts
from fedveil.federation.progress import start
from fedveil.federation.round import client_round
from fedveil.mechanism.mechanisms import NoiseMemory
from fedveil.methods.method import is_user_defined
from fedveil.models.probe import check_output
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.release_layout import NullLedger

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.experiment.assembly import Prepared
    from fedveil.experiment.child_process import Stage
    from fedveil.experiment.experiment import Experiment
    from fedveil.federation.progress import Federation
    from fedveil.federation.round import ClientTask, Context, Outcome
    from fedveil.training.local import GradientSource, LocalSpec
    from fedveil.training.params import FlatModel

_WHAT = "the rehearsal on examples of the test set, before anything is released,"
_BATCH = 4
"""Largest number of examples in a rehearsed batch."""
_USUAL_NORM = Training.model_fields["max_update_norm"].default

_log = logging.getLogger(__name__)


def rehearsed(experiment: Experiment, prepared: Prepared, *, whole: bool = True) -> tuple[FlatModel, LocalSpec]:
    """Return the configured network and the specification of local training, after a rehearsal has succeeded.

    Args:
        whole: also rehearse a round. Without it, as at a client whose server has done that, only the network and the task are
            tried, and at record level the gradients of single examples.

    Raises:
        FedveilError: what failed, where in the user's code, and what to do; nothing was released.
    """
    model = experiment.template()
    tried = model if can_fork() else experiment.template()
    result = in_child(partial(_rehearse, experiment, prepared, tried, whole), _WHAT)
    for remark in result["remarks"]:
        _log.warning("%s", remark)
    return model, replace(experiment.setting.local, pairs=result["pairs"], loop=result["loop"])


def _rehearse(experiment: Experiment, prepared: Prepared, model: FlatModel, whole: bool, stage: Stage) -> dict[str, Any]:
    """Return remarks for the user, and which of the options `pairs` and `loop` local training needs (see `LocalSpec`)."""
    setting, (x, y) = experiment.setting, public_examples(prepared)
    task = setting.task
    stage("in the forward pass and the loss")
    remarks = check_output(model, x, y, task)
    local, dp_sgd = spec_for(setting, model, x, y), setting.dp_sgd()
    if dp_sgd is not None:
        stage("in the gradients of single examples")
        remarks += check_single_examples(model, x, y, task, loop=local.loop)
        if local.loop and not setting.local.loop:
            remarks.append(
                f"model: {_name(model)} packs sequences, so each example has a pass of its own, as with training.per_example = "
                f"'loop': reading the output of the padded sequence at each length, as by gather, is faster"
            )
    if local.pairs and local.batch_size == 1:
        raise ConfigError(
            f"training.batch_size = 1, and {_name(model)} cannot learn from one example, as under batch normalisation, "
            f"which takes statistics of a batch: set training.batch_size to 2 or more, or take nn.GroupNorm or nn.LayerNorm"
        )
    ours = not (
        model.is_custom or task.is_user_defined or is_user_defined(experiment.method)
    )  # built-in code, whose rounds are tested
    ours = ours and experiment.max_update_norm == _USUAL_NORM
    if whole and not ours:
        remarks += _rehearse_round(experiment, prepared, (model, local), stage)
    return {"remarks": remarks, "pairs": local.pairs, "loop": local.loop}


def _rehearse_round(experiment: Experiment, prepared: Prepared, network: tuple[FlatModel, LocalSpec], stage: Stage) -> list[str]:
    model, job = network[0], _made_up(experiment, prepared, network)
    context, progress = job.context, start(job)
    first = progress.model
    stage("in the plan of the first round")
    tasks, released, plan = begin_round(job, progress, list(range(len(context.clients))))
    todo = list(tasks)
    single = todo.pop() if len(todo) > 2 else None
    outcomes: list[Outcome] = []
    with Inline(context) as engine:
        for task in todo:
            size = context.clients.size(task.client)
            stage(f"in local training on {size} examples")
            with _last_batch_of_one(context.spec.batch_sizes(size), model) if outcomes else nullcontext():
                outcomes += engine.map([task])
        remarks = _of_single(context, single) if single is not None and context.spec.pairs else []
    if experiment.engine.name in TOGETHER and job.setting.example_clip is None:
        stage(f"in training several clients together (run.engine = {experiment.engine.name!r})")
        with Batched(context) as together:
            list(together.map(todo))
    remarks += _refused(job, outcomes)
    if any(o.release is not None for o in outcomes):
        stage("in the server's step")
        progress.history.append(finish_round(job, progress, collect_outcomes(outcomes), plan, released))
    stage("in the scores")
    progress.privates = {o.client: o.private for o in outcomes if o.private}
    progress.model, progress.average = first, {}  # one noisy step on made-up batches may lead anywhere
    progress.history.append(evaluate(job, progress))
    release_score(job, progress)
    stage("in saving what a checkpoint holds")
    history = [vars(record) for record in progress.history]
    for _ in tree_parts(vars(progress) | {"spent": sorted(progress.spent), "history": history}):
        pass
    return remarks


def _made_up(experiment: Experiment, prepared: Prepared, network: tuple[FlatModel, LocalSpec]) -> Federation:
    """Return the run with made-up clients, who have examples of the test set, and with a door that charges nobody.

    The first client has only full batches, the second a last batch of one example, the last a single example; a run of fewer
    clients has fewer.
    """
    setting, (x, y) = experiment.setting, public_examples(prepared)
    spec = setting.local
    batch, steps = min(spec.batch_size, _BATCH), None if spec.steps is None else min(spec.steps, 2)
    least = setting.least_set if setting.noise_place == "shares" else setting.min_survivors or 0
    sizes = [batch, batch + 1, *[batch] * max(0, least - 2), 1][: setting.clients]
    sizes = sizes if sizes[1:] else [batch + 1]
    tests = None if prepared.client_tests is None else _clients(x, y, [len(y)] * len(sizes))
    public = None if prepared.public is None else (prepared.public[0][:_BATCH], prepared.public[1][:_BATCH])
    made_up = replace(
        prepared,
        clients=_clients(x, y, sizes),
        client_tests=tests,
        test=(x, y),
        public=public,
        declared=prepared.population,
    )
    job = federation(experiment, made_up, Path("no-ledger"), "rehearsal", network)
    context = replace(
        job.context,
        spec=replace(job.context.spec, batch_size=batch, epochs=1, steps=steps),
        door=replace(job.context.door, ledger=NullLedger(), memory=NoiseMemory()),
        gradients=_one_step,
        rehearsal=True,
    )
    whole = experiment.personal_on_test_set and experiment.engine.name != "flower"
    return replace(job, context=context, personal_on_test_set=whole, masks=None)


def _clients(x: Tensor, y: Tensor, sizes: list[int]) -> Clients:
    chosen = torch.cat([torch.arange(size) % len(y) for size in sizes])
    return Clients(x[chosen], y[chosen], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _one_step(source: GradientSource) -> GradientSource:
    """Replace all steps of DP-SGD by a single step with all of the few examples."""
    if not isinstance(source, PerExampleGradient):
        return source
    return replace(source, plan=replace(source.plan, steps=1, rate=1.0, expected=2.0))


@contextmanager
def _last_batch_of_one(sizes: list[int], model: FlatModel) -> Iterator[None]:
    """Raise an explained error if training fails on a batch of one example, which any client's last one may be."""
    try:
        yield
    except Exception as error:
        if sizes[-1] > 1:
            raise
        raise ConfigError(f"{_alone(model)}: {type(error).__name__}: {(str(error) or '-').splitlines()[0]}; {_REMEDY}") from error


_REMEDY = (
    "batches differ in size, and a client may have one example: take nn.GroupNorm or nn.LayerNorm where statistics are taken "
    "over a batch, or nn.BatchNorm1d, which fedveil knows, in the place of a normalisation of your own; and let the loss of "
    "one example be a number"
)


def _alone(model: FlatModel) -> str:
    return f"model: {_name(model)} cannot be trained on a batch of one example, which the last batch of a client may be"


def _of_single(context: Context, task: ClientTask) -> list[str]:
    """Return a remark if a client with a single example cannot be trained on, and there are no running statistics."""
    try:
        problem = client_round(context, task).error
    except Exception as error:
        problem = f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"
    return [f"{_alone(context.model)}: clients with a single example will be left out ({problem})"] if problem else []


def _refused(job: Federation, outcomes: list[Outcome]) -> list[str]:
    """Return remarks on discarded updates; raise an error if all were discarded, or one because of a batch of one example."""
    refused, usual = [o.error for o in outcomes if o.error], job.context.door.max_norm == _USUAL_NORM
    if len(refused) == len(outcomes):
        raise ConfigError(f"in the rehearsal on examples of the test set every update was discarded: {refused[0]}")
    if refused and not outcomes[0].error and job.context.spec.batch_size > 1 and usual:
        raise ConfigError(f"{_alone(job.context.model)}: {refused[0]}; {_REMEDY}")
    return [f"in the rehearsal on examples of the test set an update was discarded: {refused[0]}"] if refused else []


def _name(model: FlatModel) -> str:
    return type(model.module).__name__
