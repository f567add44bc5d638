"""An estimate of the time of a recipe on this machine, from counted operations and the speed of two small networks."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedveil.attacks.attack_types import Bounds
from fedveil.attacks.gan import generator
from fedveil.data.catalogue import info
from fedveil.experiment.model_section import network_of
from fedveil.experiment.public_setting import setting_of
from fedveil.models.model_registry import build
from fedveil.studies.reproduce.recipe import Only, Recipe, kept, rows
from fedveil.studies.reproduce.recipe_files import RowJob, Scale, job_of
from fedveil.training.cores import available_cores

_BACKWARD = 3
"""Forward passes that cost as much as a training step, about."""
_PASSES = 10
"""Number of times that a step of a round reads or writes every parameter, about."""
BEGIN = 2.0
"""Seconds of a run in addition to its rounds and its data: statement, ledger, files."""
START = time.process_time()
"""Seconds that this process took to start, torch included; each worker takes as long."""
_READ = 3e-8
"""Seconds to load, standardise and partition one number of the training data."""
_PROBES = ({"name": "lenet5"}, {"name": "cnn2", "channels": [32, 64], "hidden": 512})


def seconds_of(recipe: Recipe, scale: Scale, only: Only | None = None, overrides: Sequence[str] = ()) -> float:
    """Estimate the seconds for a recipe's rows (those of `only`, with the user's overrides) on all cores of this machine."""
    chosen = [row for row in rows(recipe) if not row.missing and kept(recipe, row, scale, only or {})]
    name = str(recipe.measure["name"])
    cores = min(available_cores(), max(len(chosen), 1))
    return START + sum(_job(job_of(recipe, row, scale, overrides=overrides), name) for row in chosen) / cores


def spoken(seconds: float) -> str:
    """Return a duration in words."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.2g} {unit}" if seconds < 100 * size else f"about {seconds / size:.0f} {unit}"
    return f"about {max(math.ceil(seconds), 1)} s"


def _job(job: RowJob, measure: str) -> float:
    if measure in ("statement", "partition", "worst-privacy", "sensitivity-terms"):
        return BEGIN
    data = info(job.config.data.name)
    begin = BEGIN + _READ * data.train_size * math.prod(data.input_shape)
    forward, parameters = _size(json.dumps(job.config.model.section(), sort_keys=True), data.input_shape, data.classes)
    if measure == "inversion":
        return begin + _attack(job, forward)
    s = setting_of(job.config)
    each = max(s.records, 1)  # unknown for some data sets before they are loaded
    steps = s.cohort * s.local.steps_for(each) * s.rounds
    examples = steps * min(s.local.batch_size, each) * _BACKWARD
    evaluations = -(-s.rounds // (job.config.training.evaluate_every or s.rounds)) if measure != "twin" else 1
    own_tests = 2 * job.config.data.client_test_fraction * data.train_size  # by the global and by the personal models
    models = 1 + s.clients * job.config.training.personal_on_test_set
    training = _per_operation(forward) * forward * (examples + evaluations * (models * data.test_size + own_tests))
    training += steps * parameters * _PASSES * _per_number()
    if measure == "twin":
        return begin + 2 * training
    if measure == "generated":
        return begin + training + _generator(job, forward, s.rounds, data.input_shape, data.classes)
    return begin + training + (_attack(job, forward) if measure == "inversion-after" else 0)


def _attack(job: RowJob, forward: float) -> float:
    """Estimate reconstructions: an evaluation differentiates a gradient, about three training steps; L-BFGS needs 20 a step."""
    settings = job.options.get("settings", {})
    kind = job.options.get("attack", "ig")
    steps = settings.get("steps", {"ig": 4800, "gradinversion": 2000}.get(kind, 300))
    starts = settings.get("restarts", settings.get("seeds", {"ig": 1}.get(kind, 4)))
    evaluations = job.options.get("images", 10) * steps * starts * (20 if kind in ("dlg", "idlg") else 1)
    return float(evaluations * max(_BACKWARD**2 * forward * _per_operation(forward), _evaluation()))


def _generator(job: RowJob, forward: float, rounds: int, shape: tuple[int, ...], classes: int) -> float:
    """Estimate a step of the generator: two passes of it and three of the model, one of each backwards."""
    module = generator(Bounds(shape), classes, 100, torch.Generator())
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module(torch.zeros((2, 100 + classes)))
    own = counter.get_total_flops() / 2
    examples = rounds * job.options.get("steps", 200) * job.options.get("batch", 64)
    return float(examples * ((1 + _BACKWARD) * own + (2 + _BACKWARD) * forward) * _per_operation(own))


@cache
def _size(options: str, shape: tuple[int, ...], classes: int) -> tuple[float, int]:
    """Return the operations of one example's forward pass, and the number of parameters."""
    network = network_of(json.loads(options))
    module = build(network.name, shape, classes, 0, **dict(network.options))
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module(torch.zeros((1, *shape)))
    numbers = sum(p.numel() for p in module.parameters())
    return max(float(counter.get_total_flops()), 2.0 * numbers), numbers


def _per_operation(forward: float) -> float:
    """Return seconds per operation, from the timed network nearest in size."""
    timed = _timed()
    return min(timed, key=lambda pair: abs(math.log(pair[0] / forward)))[1]


@cache
def _timed() -> tuple[tuple[float, float], ...]:
    """Return (operations of one forward pass, seconds per operation) of two networks, each timed for half a second."""
    found = []
    for options in _PROBES:
        text, shape, batch = json.dumps(options), (3, 32, 32), 16
        forward, _ = _size(text, shape, 10)
        module = build(str(options["name"]), shape, 10, 0, **{k: v for k, v in options.items() if k != "name"})
        x, y = torch.zeros((batch, *shape)), torch.zeros(batch, dtype=torch.int64)

        def step(module: torch.nn.Module = module, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            loss = torch.nn.functional.cross_entropy(module(x), y)
            loss.backward()  # type: ignore[no-untyped-call]

        found.append((forward, _time(step) / (_BACKWARD * forward * batch)))
    return tuple(found)


@cache
def _evaluation() -> float:
    """Return the seconds to differentiate a gradient of LeNet-5 on one image, about equal for all small networks."""
    options, shape = _PROBES[0], (3, 32, 32)
    module = build(str(options["name"]), shape, 10, 0)
    x, y = torch.rand((1, *shape), requires_grad=True), torch.zeros(1, dtype=torch.int64)

    def evaluate() -> None:
        loss = torch.nn.functional.cross_entropy(module(x), y)
        shared = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        torch.autograd.grad(torch.stack([g.square().sum() for g in shared]).sum(), x)

    return _time(evaluate)


@cache
def _per_number() -> float:
    """Return the seconds to update one number of a long vector."""
    a, b = torch.zeros(4_000_000), torch.ones(4_000_000)
    return _time(lambda: a.add_(b, alpha=0.1)) / len(a)


def _time(act: Any, budget: float = 0.25) -> float:
    """Return the seconds of one call, the median of calls for `budget` seconds after one warm-up call."""
    act()
    durations, end = [], time.perf_counter() + budget
    while time.perf_counter() < end:
        begin = time.perf_counter()
        act()
        durations.append(time.perf_counter() - begin)
    return statistics.median_high(durations) if durations else budget
