"""Search for settings: on a public proxy, by private selection, or on the private data at the composed price.

A private search is charged completely before its first run. Afterwards only the published copy of the best run remains, without
times; all other runs are deleted, and nothing that is written, printed or returned depends on their number.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import secrets
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

from fedveil.accounting.selection import Selection, curve_of, draw, selection_divergence
from fedveil.accounting.types import Event, OneOrder
from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.assembly import Prepared, prepare
from fedveil.experiment.config import Config, parse
from fedveil.experiment.experiment import SharedBudgetSpec
from fedveil.experiment.public_setting import calibrated_setting, method_of, setting_of, task_of
from fedveil.experiment.published_copy import copy_public
from fedveil.experiment.rehearsal import rehearsed
from fedveil.experiment.resolve import data_spec, resolve, resolve_here
from fedveil.experiment.run import train
from fedveil.experiment.run_directory import new_run_id, private_folder, write_config, write_json
from fedveil.experiment.shared_budget import run_name, shared_budget
from fedveil.federation.evaluation import check_score
from fedveil.ledger.entry import event_columns
from fedveil.ledger.filters import RdpFilter
from fedveil.ledger.ledger import AGGREGATE, Entry
from fedveil.methods.one_price import check_selection
from fedveil.methods.run_cost import ROUNDING, run_releases
from fedveil.statement.statement import Statement
from fedveil.statement.statement_layout import read_statement
from fedveil.studies.cell import Cell, CellState, Listener
from fedveil.studies.grid import run_grid
from fedveil.studies.tune.proxy_grid import TuningSpec, check_grid, combinations, overrides
from fedveil.tasks.task import Column


@dataclass(frozen=True)
class SearchSpec:
    """A search on the private data.

    Args:
        config: configuration to tune. grid: values to try by key, `section.key`.
        score_noise: noise multiplier of the score on the clients' examples; None to choose by the public test set.
    """

    config: Config
    grid: Mapping[str, Sequence[Any]]
    score_noise: float | None

    def __post_init__(self) -> None:
        check_grid(self.grid)
        if self.config.privacy.selection is not None:
            raise ConfigError("privacy.selection is written by this command: leave it out")
        if self.config.privacy.epsilon is None:
            raise ConfigError("privacy.epsilon is not set: give the guarantee that the search is to have")
        if self.config.run.engine == "flower":
            raise ConfigError("run.engine = 'flower' shows the clients every run of a search: leave it out")
        if self.score_noise is None:
            return
        if not self.config.data.client_test_fraction:
            raise ConfigError(
                "a setting chosen by the test set scores too well on it, so the clients' own test examples decide, and there "
                "are none: set data.client_test_fraction, such as 0.2; or give --by-test-set, and the statement says so"
            )
        check_score(task_of(self.config), tests=True)

    def candidates(self, selection: Mapping[str, Any], **privacy: Any) -> list[Config]:
        """Return the configuration of each setting, as that of a run that this selection chose.

        Raises:
            ConfigError: the releases of the settings or their prices differ; one price is counted for all of them.
        """
        sections = self.config.model_dump(mode="json")
        noise = {} if self.score_noise is None else {"score_noise": self.score_noise}
        sections["privacy"] |= {"selection": {**selection, **noise}, **privacy}
        found = [parse(json.loads(json.dumps(sections)), overrides(setting)) for setting in combinations(self.grid)]
        for method, s in ((method_of(config), setting_of(config)) for config in found):
            check_selection(method, s)
        prices = [run_releases(method, s, s.scope.view) for method, s in map(calibrated_setting, found)]
        if not all(_same(price, prices[0]) for price in prices):
            raise ConfigError(
                f"--try {', '.join(self.grid)}: these settings plan other releases (other rounds, clients per round or noise), "
                f"and a search on private data has one price for all: leave such keys out, or choose them on public data (--on)"
            )
        return found


def _same(one: Sequence[Event], other: Sequence[Event]) -> bool:
    """Return whether two runs make the same releases, up to the rounding of noise levels."""
    if len(one) != len(other):
        return False
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(event_columns(a), event_columns(b), strict=True)]
    return all(a == b or (isinstance(a, float) and isinstance(b, float) and isclose(a, b, rel_tol=ROUNDING)) for a, b in pairs)


@dataclass(frozen=True)
class Looked:
    """An inspected run: its state, its setting, and its score (higher is better)."""

    state: CellState
    setting: Mapping[str, Any]
    score: float


def look_at_all(spec: SearchSpec, out: Path, jobs: int | None = None, listener: Listener | None = None) -> list[Looked]:
    """Run every setting in `out`, resuming an interrupted search; return the finished runs, best first.

    Each run has the noise at which it alone would cost privacy.epsilon; its proven epsilon counts all runs.

    Raises:
        FedveilError: no setting could be run.
    """
    settings = combinations(spec.grid)
    noise = calibrated_setting(spec.candidates({"runs": 1})[0])[1].z
    configs = spec.candidates({"runs": len(settings)}, epsilon=None, noise_multiplier=noise)
    cells = [Cell(f"setting-{i}", config, {"setting": i}) for i, config in enumerate(configs)]
    states = run_grid(cells, out, jobs, listener)
    scores = [_score(spec, state) for state in states]
    ranked = sorted(((score, i) for i, score in enumerate(scores) if score is not None), reverse=True)
    if not ranked:
        raise FedveilError(f"no setting could be run; the first reason: {states[0].error}")
    trials = [{"setting": settings[i], "score": scores[i], "error": state.error} for i, state in enumerate(states)]
    write_json(out / "tuning.json", {"runs": len(settings), "chosen": cells[ranked[0][1]].name, "trials": trials})
    return [Looked(states[i], settings[i], score) for score, i in ranked]


def _score(spec: SearchSpec, state: CellState) -> float | None:
    """Return the score of a run, higher is better; None if it failed."""
    if state.error or state.state != "done":
        return None
    if spec.score_noise is not None:
        return float(state.summary["selection_score"])
    return None if state.score is None else state.cell.main.sign * state.score


BOOKED = "selection.json"
"""The file with the charge of a search, written before the first run. Without WINNER, the search was interrupted."""
WINNER = "run"


@dataclass(frozen=True)
class Chance:
    """The randomness of a search: `bits(n)` are n uniform bits, `below(n)` is uniform below n."""

    bits: Callable[[int], int] = secrets.randbits
    below: Callable[[int], int] = secrets.randbelow


def private_search(spec: SearchSpec, out: Path, selection: Selection, chance: Chance | None = None) -> tuple[Path, Statement]:
    """Search, and write the published copy of the best run to `out`; return its directory and its statement.

    Args:
        selection: distribution of the secret number of runs. chance: secret randomness by default.

    Raises:
        ConfigError: invalid settings; nothing is charged. BudgetExhausted: privacy.budget does not suffice; nothing is trained.
        FedveilError: no run finished; the charge stays.
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
    _charge_search(config, candidates[0], out)
    work = private_folder(out)
    try:
        best = -math.inf
        for _ in range(draw(law, chance.bits)):
            i = chance.below(len(candidates))
            best = max(best, _tried(candidates[i], prepared[i], work, best))
        if best == -math.inf:
            raise FedveilError(
                "no run of the search could be finished, and the reason is secret, as the runs are; the charge remains: try "
                "the settings on public data first (fedveil tune --on)"
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
    """Return whether two configurations train on the same tensors."""
    return (one.data, one.public, one.task) == (other.data, other.public, other.task)


def _tried(config: Config, prepared: Prepared, work: Path, best: float) -> float:
    """Return the score of one run, or -inf if it failed; the best run so far stays in `work / "best"`."""
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
    except BaseException:  # a failure is secret, like every outcome of the run
        return -math.inf
    if math.isnan(score) or score <= best:
        return -math.inf
    shutil.rmtree(work / "best", ignore_errors=True)
    folder.rename(work / "best")
    return score


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress all output, warnings and logs of a run."""
    level = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


def _charge_search(config: Config, candidate: Config, out: Path) -> None:
    """Charge the whole search to privacy.budget, if there is one, and record that it began."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        begun = "holds a search that was begun and charged" if (out / BOOKED).exists() else "exists and is not empty"
        raise ConfigError(
            f"{out} {begun}: a search cannot be continued, since its end would reveal something about its first part, and a "
            "new one is charged again: choose another --out"
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


@dataclass(frozen=True)
class TriedSetting:
    """One setting with its scores on the proxy's test set, one per seed; NaN and the reason if a run failed."""

    setting: Mapping[str, Any]
    scores: tuple[float, ...]
    error: str = ""

    @property
    def mean(self) -> float:
        """Mean of the scores."""
        return statistics.mean(self.scores)


@dataclass(frozen=True)
class Tuned:
    """The outcome: trials, best first; the configuration with the best one's keys; the metric that decided."""

    trials: tuple[TriedSetting, ...]
    config: Config
    metric: Column


def tune_on(spec: TuningSpec, out: Path, jobs: int | None = None, listener: Listener | None = None) -> Tuned:
    """Run the grid on the proxy in `out`, resuming an interrupted search; write `tuned.toml` and `tuning.json` there.

    Raises:
        FedveilError: no setting could be run.
    """
    cells = spec.cells()
    states = run_grid(cells, out, jobs, listener)
    metric = cells[0].main
    trials = []
    for i, setting in enumerate(spec.settings()):
        own = [state for state in states if state.cell.labels["setting"] == i]
        error = next((state.error for state in own if state.error), "")
        scores = tuple(float("nan") if state.score is None or state.error else state.score for state in own)
        trials.append(TriedSetting(setting, scores, error))
    right = sorted((t for t in trials if not t.error), key=lambda t: -metric.sign * t.mean)
    if not right:
        raise FedveilError(f"no setting could be run on {spec.proxy}; the first reason: {trials[0].error}")
    chosen = parse(json.loads(spec.config.model_dump_json()), overrides(right[0].setting))
    tuned = Tuned((*right, *(t for t in trials if t.error)), chosen, metric)
    write_config(out / "tuned.toml", chosen.resolved())
    write_json(out / "tuning.json", record(spec, tuned))
    return tuned


def record(spec: TuningSpec, tuned: Tuned) -> dict[str, Any]:
    """Return the record of the settings, the proxy and the scores."""
    return {
        "on": spec.proxy,
        "metric": tuned.metric.name,
        "runs": len(tuned.trials) * spec.seeds,
        "chosen": dict(tuned.trials[0].setting),
        "trials": [{"setting": dict(t.setting), "scores": list(t.scores), "error": t.error} for t in tuned.trials],
    }
