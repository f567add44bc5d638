"""Private selection: a secret number of runs with settings drawn afresh, of which the best is released and nothing else.

The whole price is charged before the first run. What is kept afterwards is the published copy of the best run, without times;
all other runs are gone, and nothing that is written, shown or returned depends on how many there were.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.accounting.chosen_run import Selection
from fedveil.accounting.random_tries import draw
from fedveil.accounting.selection import curve_of, selection_divergence
from fedveil.accounting.types import OneOrder
from fedveil.configuration.config import Config
from fedveil.errors import ConfigError, FedveilError
from fedveil.ledger.filters import RdpFilter
from fedveil.ledger.ledger import AGGREGATE, Entry
from fedveil.methods.run_cost import run_releases
from fedveil.run.assembly import Prepared, new_run_id, prepare
from fedveil.run.experiment import SharedBudgetSpec
from fedveil.run.published_copy import copy_public
from fedveil.run.rehearsal import rehearsed
from fedveil.run.resolve import data_spec, resolve, resolve_here
from fedveil.run.run import train
from fedveil.run.run_directory import private_folder, write_json
from fedveil.run.shared_budget import run_name, shared_budget
from fedveil.statement.statement import Statement
from fedveil.statement.statement_json import read_statement
from fedveil.studies.tune.private_data import SearchSpec

BOOKED = "selection.json"
"""In the search's folder, written before the first run: what was charged. Without WINNER beside it the search broke off."""
WINNER = "run"


@dataclass(frozen=True)
class Chance:
    """Where the number of runs and their settings come from: `bits(n)` is uniform of n bits, `below(n)` uniform below n."""

    bits: Callable[[int], int] = secrets.randbits
    below: Callable[[int], int] = secrets.randbelow


def private_search(spec: SearchSpec, out: Path, selection: Selection, chance: Chance | None = None) -> tuple[Path, Statement]:
    """Search, and leave the published copy of the best run in `out`; returns its directory and its statement.

    Args:
        selection: the law of the secret number of runs. chance: secret by default.

    Raises:
        ConfigError: before anything is charged. BudgetExhausted: privacy.budget has no room, and nothing was trained.
        FedveilError: no run could be finished; the charge stays.
    """
    law, chance, config = selection.law, chance or Chance(), spec.config
    if law is None or config.run.seeded_noise or config.run.track:
        raise ConfigError(
            "tune --private draws from secret randomness and shows no run to a tracker: leave run.seeded_noise and run.track out"
        )
    candidates = spec.candidates({"runs": selection.runs, "shape": selection.shape}, budget=None)
    first = prepare(data_spec(candidates[0]))
    prepared = [first if _same_data(one, candidates[0]) else prepare(data_spec(one)) for one in candidates]
    for candidate, its_data in zip(candidates, prepared, strict=True):
        rehearsed(resolve(candidate, its_data.population), its_data)
    begin = time.time()
    _book(config, candidates[0], out)
    work = private_folder(out)
    try:
        best = -math.inf
        for _ in range(draw(law, chance.bits)):
            i = chance.below(len(candidates))
            best = max(best, _tried(candidates[i], prepared[i], work, best))
        if best == -math.inf:
            raise FedveilError(
                "no run of the search could be finished, and why stays secret, like the runs; the charge stays: try the settings "
                "on public data first (fedveil tune --on)"
            )
        copy_public(work / "best", out / WINNER)
    except KeyboardInterrupt:
        stop = KeyboardInterrupt()
        stop.add_note("interrupted; the search stays charged and is not continued: a new one, in another --out, is charged anew")
        raise stop from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for path in (*out.rglob("*"), out):
        os.utime(path, (begin, begin))
    return out / WINNER, read_statement(out / WINNER)


def _same_data(one: Config, other: Config) -> bool:
    """Whether two configurations train on the same tensors."""
    return (one.data, one.public, one.task) == (other.data, other.public, other.task)


def _tried(config: Config, prepared: Prepared, work: Path, best: float) -> float:
    """The score of one run, which stays in `work / "best"` if it is the best so far; -inf where it failed."""
    folder = work / "candidate"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with _silence():
            result = train(resolve_here(config, prepared.population), prepared, folder)
        score = result.selection_score
        if score is None:
            score = result.columns.main.sign * result.score
    except KeyboardInterrupt:
        raise
    except BaseException:  # a failure is an outcome of the run, and secret like it
        return -math.inf
    if math.isnan(score) or score <= best:
        return -math.inf
    shutil.rmtree(work / "best", ignore_errors=True)
    folder.rename(work / "best")
    return score


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Nothing that a run prints, warns of or logs gets out."""
    level = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


def _book(config: Config, candidate: Config, out: Path) -> None:
    """Charge the whole search to privacy.budget, if there is one, and write down that it began."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        begun = "holds a search that was begun and charged" if (out / BOOKED).exists() else "exists and is not empty"
        raise ConfigError(
            f"{out} {begun}: a search is never continued, since its end would tell of its first part, and a new one is charged "
            f"anew: choose another --out"
        )
    experiment = replace(resolve(candidate), budget=SharedBudgetSpec(config.privacy.budget, config.run.name))
    method, s = experiment.method, experiment.setting
    budget, law = shared_budget(experiment), None if s.selection is None else s.selection.law
    assert law is not None
    name = run_name(experiment, new_run_id())
    out.mkdir(parents=True, exist_ok=True)
    if budget is not None:
        if not isinstance(budget.cap, RdpFilter):
            raise ConfigError(
                f"privacy.budget = '{budget.path}' counts in Gaussian differential privacy, which has no price for a selection: "
                f"create one that counts at a Renyi order (fedveil budget create --like CONFIG, where clients are sampled)"
            )
        curve = curve_of(run_releases(method, s, s.scope.view), s.scope.adjacency)
        event = OneOrder(
            f"the best of {law.mean:g} expected runs; its cost is known at Renyi order {budget.cap.order:g}",
            float(budget.cap.order),
            selection_divergence(law, curve, budget.cap.order),
        )
        scope = s.scope
        entry = Entry(name, 0, AGGREGATE, scope.unit, scope.adjacency, scope.view, event, (math.inf,), (0.0,), 0, 0, None)
        ledger = budget.ledger(name)
        ledger.charge_all([entry])
        ledger.close()
    charged = {"epsilon": s.epsilon, "delta": s.delta, "budget": config.privacy.budget, "name": name}
    write_json(out / BOOKED, {**charged, "selection": candidate.model_dump(mode="json")["privacy"]["selection"]})
