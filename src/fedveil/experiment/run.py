"""Execution of one configuration from start to end, which leaves a run directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import fedveil.experiment.run_directory as rundir
from fedveil.data.dataset import strata
from fedveil.errors import ConfigError, FedveilError
from fedveil.executors.engine_names import OTHER_ENGINES
from fedveil.executors.interrupts import put_off
from fedveil.executors.select_engine import device_for, engine, engine_to_record
from fedveil.experiment.assembly import Prepared, federation, prepare
from fedveil.experiment.data_card import HandedOver, check_data, how_to_resume, recorded, same_handed_over, write_card
from fedveil.experiment.plugins import digests
from fedveil.experiment.rehearsal import rehearsed
from fedveil.experiment.resolve import data_spec, resolve_here
from fedveil.experiment.result import Result, Trivial, trivial_of
from fedveil.experiment.resume import count_spent, identity, resumable, run_id_of, same_run
from fedveil.experiment.run_directory import append_history, as_written, locked, write_history
from fedveil.experiment.shared_budget import reserved, run_name, shared_budget
from fedveil.experiment.spending import spending_of
from fedveil.experiment.tracking import RunInfo, Tracker, following, tracker_named
from fedveil.experiment.verification import check_opening, conclude, opening
from fedveil.federation.checkpoint import Checkpoints
from fedveil.federation.evaluation import load_final_model, release_score
from fedveil.federation.fit import fit
from fedveil.federation.history import ALL_FAILED, Columns, Record, Row, declared
from fedveil.federation.progress import Federation, Progress, start
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Ledger
from fedveil.statement.statement import Statement
from fedveil.statement.statement_layout import to_dict, to_markdown
from fedveil.training.cores import process_state

if TYPE_CHECKING:
    from fedveil.data.dataset import Dataset
    from fedveil.data.partition import Partition
    from fedveil.experiment.config import Config
    from fedveil.experiment.experiment import Experiment
    from fedveil.federation.round import ClientTask, Engine, Outcome


class SavedRounds:
    """Saves rounds, and reports each once it is saved, in the thread of the run.

    Args:
        report: called when the last round of `progress` is saved; writes its row and informs listeners.
        beside: whether clients may train while a round is saved; not if they release by themselves, as on other machines.
    """

    def __init__(self, checkpoints: Checkpoints, report: Callable[[], None], *, beside: bool) -> None:
        self.checkpoints, self.report, self.beside = checkpoints, report, beside
        self._unreported = False

    def save(self, progress: Progress) -> None:
        """Start to save what the last round changed; an interruption is deferred until then, so that `finish` awaits the save."""
        with put_off():
            self.checkpoints.begin(progress)
            self._unreported = True
        if not self.beside:
            self.finish()

    def look(self) -> None:
        """Report the round if it has been saved by now."""
        if not self.checkpoints.writing:
            self.finish()

    def finish(self) -> None:
        """Wait until the round is saved, and report it.

        Raises:
            FedveilError: it cannot be saved.
        """
        unreported, self._unreported = self._unreported, False
        self.checkpoints.finish()
        if unreported:
            self.report()


class _SavingEngine:
    """Engine wrapper that completes a round's outcomes only after the previous round is saved, so that these can be released."""

    def __init__(self, engine: Engine, saved: SavedRounds) -> None:
        self._engine, self._saved = engine, saved

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """Yield the engine's outcomes, and wait for the previous round to be saved before the current one is released."""
        for outcome in self._engine.map(tasks):
            self._saved.look()
            yield outcome
        self._saved.finish()

    def __enter__(self) -> Self:
        self._engine.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.__exit__(*exc)


_log = logging.getLogger(__name__)


@process_state()
def run(
    config: Config,
    out: str | Path | None = None,
    on_round: Callable[[Row], None] | None = None,
    *,
    data: Dataset | None = None,
    partition: Partition | None = None,
    resume: bool = False,
    track: Sequence[Tracker] = (),
) -> Result:
    """Train as configured.

    Args:
        data, partition: used instead of the configured ones, and recorded so.
        out: the run directory, which must be new, empty, or left by a run that ended before it began to train; by default
            runs/<method>-<data>-<id>.
        on_round: called with the history's new row after each round.
        resume: continue the interrupted run in `out`, from its last finished round.
        track: trackers that follow the run, in addition to the configured ones (see `trackers`).

    Raises:
        ConfigError, DataError: before anything is trained. FedveilError: the run directory cannot be written.
        BudgetExhausted: the plan exceeds the remaining privacy.budget; nothing was trained.
    """
    refuse_secret_search(config)
    if config.run.secure_aggregation == "on":
        raise ConfigError(
            "run.secure_aggregation = 'on' needs clients on machines of their own: start it with fedveil net, or set it to "
            "'simulate', which masks all clients in this process",
            key="run.secure_aggregation",
            value="on",
        )
    handed_over = HandedOver(data, partition)
    device_for(config.run.engine, config.training.client_timeout)
    if resume:
        if out is None:
            raise ConfigError("resuming needs the run directory: give out")
        same_handed_over(saved := resumable(Path(out)), handed_over, Path(out))
        same_run(saved, recorded(config, handed_over), Path(out), but_model=not config.model.plain)
    config = recorded(config, handed_over)
    prepared = prepare(data_spec(config), data, partition)
    experiment = resolve_here(config, prepared.population, Path(out) if resume and out is not None else None)
    return train(experiment, prepared, out, on_round, resume=resume, track=track)


@process_state()
def train(
    experiment: Experiment,
    prepared: Prepared,
    out: str | Path | None,
    on_round: Callable[[Row], None] | None = None,
    *,
    resume: bool = False,
    track: Sequence[Tracker] = (),
    clients: Callable[[str], Callable[[Federation], Engine]] | None = None,
) -> Result:
    """Train as `run` does, for an experiment from `resolve_here` and data that are already loaded.

    Args:
        clients: called with the run's id before anything is written into its directory; returns a function that makes the engine
            that reaches the clients. By default, the configured engine.
    """
    trackers = [*track, *(tracker_named(name) for name in experiment.track)]
    method, setting, engine = experiment.method, experiment.setting, experiment.engine
    device = "cpu" if engine.name == "auto" else device_for(engine.name, engine.timeout)
    statement = experiment.statement
    tried, local = rehearsed(experiment, prepared)
    model = tried.to(device)
    trivial = trivial_of(setting.task, prepared.test[1])
    if not resume:
        experiment = experiment.with_engine(engine_to_record(engine.name, model, experiment.client, setting, engine.timeout))
    run_id = rundir.new_run_id()
    shared = shared_budget(experiment)
    path = Path(out) if out is not None else Path("runs") / f"{method.name}-{prepared.dataset.info.name}-{run_id}"
    with ExitStack() as stack:
        if not resume:
            stack.enter_context(reserved(shared, experiment, run_id, path / "ledger.sqlite"))
            with _writable(path):
                rundir.create(path)
        stack.enter_context(locked(path))
        if resume:
            resumable(path)
            check_data(path, prepared)
            check_opening(path)
            run_id = run_id_of(path)
            stack.enter_context(reserved(shared, experiment, run_id, path / "ledger.sqlite"))
        reached = None if clients is None else clients(run_id)
        if not resume:
            _begin(path, experiment, prepared, run_id)
        checkpoints = Checkpoints(path / "checkpoint", identity(run_id, prepared, experiment.code), path / "ledger.sqlite")
        progress = checkpoints.load()
        population = None if shared is None else shared.ledger(run_name(experiment, run_id))
        job = federation(experiment, prepared, path / "ledger.sqlite", run_id, (model, local), population)
        if experiment.personal_on_test_set and experiment.engine.name != "flower":  # whose clients keep personal models
            job = replace(job, personal_on_test_set=True)
        columns = declared(job.context.task, job.context.objective, job.context.policy.part)
        if progress is not None:
            progress.history = [as_written(path, record, columns) for record in progress.history]
            columns.hide(name for record in progress.history for name in record.private)
        history = [dict(record) for record in progress.history] if progress is not None else []
        begun = RunInfo(run_id, path, experiment.written, statement, setting.layout.names, history, columns)
        with following(trackers, begun) as tracked:
            listeners = [tracked] if on_round is None else [tracked, on_round]
            return _train(experiment, job, begun, checkpoints, progress, listeners, reached, trivial)


def refuse_secret_search(config: Config) -> None:
    """Refuse the configuration of a run that private selection chose: one run alone has not been chosen."""
    if (selection := config.privacy.selection) is not None and selection.shape is not None:
        raise ConfigError(
            "privacy.selection.shape: this configuration is that of a run which private selection chose, and one run alone has "
            "not been chosen: leave privacy.selection out, or search with fedveil tune --private"
        )


def _configured(experiment: Experiment, path: Path) -> Callable[[Federation], Engine]:
    """Return a function that makes the configured engine."""
    spec = experiment.engine

    def made(job: Federation) -> Engine:
        if spec.name in OTHER_ENGINES:
            return OTHER_ENGINES[spec.name](job.context, rundir.private_folder(path) / "clients", spec.timeout)
        return engine(spec.name, job.context, spec.timeout, at_once=spec.at_once, deterministic=spec.deterministic)

    return made


def _train(
    experiment: Experiment,
    job: Federation,
    begun: RunInfo,
    saved: Checkpoints,
    progress: Progress | None,
    listeners: Sequence[Callable[[Row], None]],
    clients: Callable[[Federation], Engine] | None,
    trivial: Trivial | None,
) -> Result:
    """Train to the end, save and report each round, and write the rest of the run directory."""
    path = begun.path
    runner = (clients or _configured(experiment, path))(job)
    beside = clients is None and experiment.engine.name != "flower"  # with Flower, clients charge and send while others train
    progress = progress or start(job)
    if job.setting.max_participations is not None and not experiment.seeded_noise:
        count_spent(progress, path)
    layout, columns = job.context.door.layout, begun.columns
    with _safe(path, experiment):
        write_history(path, progress.history, layout, columns)

    def report() -> None:
        with _safe(path, experiment):
            append_history(path, progress.history, layout, columns)
        columns.hide(progress.history[-1].private)
        for listener in listeners:
            listener(dict(progress.history[-1]))

    rounds = SavedRounds(saved, report, beside=beside)

    try:
        try:
            ended = fit(job, _SavingEngine(runner, rounds), progress, spending_of(job, begun.statement), rounds.save)
        finally:
            rounds.finish()
        score = release_score(job, progress)
    except KeyboardInterrupt as stop:
        stop.add_note(f"interrupted; {saved.rounds} rounds are saved: {how_to_resume(path, experiment)} goes on from there")
        raise
    finally:
        if isinstance(job.context.door.ledger, BudgetedLedger):
            job.context.door.ledger.close()
    model = load_final_model(job, progress).to("cpu")
    model.eval()
    rows = [dict(record) for record in progress.history]
    result = Result(model, rows, begun.statement, path, ended, columns=columns, selection_score=score, trivial=trivial)
    if ended.startswith(ALL_FAILED):
        _log.warning("%s: the run has ended: %s", path, "; ".join((ended, *result.warnings)))
    with _safe(path, experiment):
        write_history(path, progress.history, layout, columns)
        rundir.write_model(path / "model.safetensors", model.state_to_save())
        whole, public = _summaries(result, begun.run, progress.history)
        rundir.write_json(rundir.private_folder(path) / "summary.json", whole)
        summary = rundir.json_text(public).encode()
        closing = conclude(path, len(progress.history), ended, {"summary.json": summary})
        rundir.write_bytes(path / "summary.json", summary)
    return replace(result, closing=closing)


def _begin(path: Path, experiment: Experiment, prepared: Prepared, run_id: str) -> None:
    """Create the run directory; the ledger comes last, and from then on the run can be resumed."""
    with _writable(path):
        rundir.create(path)
        rundir.write_versions(path / "versions.json", digests(experiment.code))
        rundir.write_config(path / "config.toml", experiment.written)
        _write_statement(path, experiment.statement)
        info = prepared.dataset.info
        labels = strata(info, prepared.dataset.y_train)
        write_card(path, experiment.data, prepared)
        rundir.write_partition(rundir.private_folder(path) / "partition.json", prepared.partition, labels, info.strata)
    selection = experiment.setting.selection
    searched = selection is not None and selection.shape is not None
    created = 0.0 if searched else None  # the start time of the best run would reveal how many ran before it
    Ledger.create(path / "ledger.sqlite", run_id, opening(path, experiment.method.name), created=created).close()


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise ConfigError(f"cannot write the run directory {path}: {problem.strerror}; choose another --out") from problem


@contextmanager
def _safe(path: Path, experiment: Experiment) -> Iterator[None]:
    """Explain a failed write after rounds have been saved: nothing is lost."""
    try:
        yield
    except OSError as problem:
        raise FedveilError(
            f"cannot write {problem.filename or path}: {problem.strerror or problem}; all finished rounds are safe in "
            f"{path / 'checkpoint'}: make room or give permission, then go on with "
            f"{how_to_resume(path, experiment)}"
        ) from problem


def _summaries(result: Result, run_id: str, history: Sequence[Record]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a summary of the run (`private/summary.json`), and its public part (`summary.json`)."""
    record = history[-1] if history else Record({})
    last = {k: v for k, v in record.items() if not isinstance(v, list | dict)}
    whole: dict[str, Any] = {
        "run": run_id,
        "rounds": len(result.history),
        "ended": result.ended or "after its last round",
        "seconds": sum(r["seconds"] for r in result.history),
        "final": last,
    }
    if result.selection_score is not None:
        whole["selection_score"] = result.selection_score
    if result.trivial is not None:
        whole["trivial"] = asdict(result.trivial)
    declared = Columns(result.columns.own)  # the last model, and so its scores, are public in every view
    scores = {k: v for k, v in last.items() if k.startswith("test_") and declared[k].public}
    public = {k: v for k, v in record.public.items() if not isinstance(v, list)} | scores
    return whole, {k: v for k, v in whole.items() if k != "seconds"} | {"final": public}


def _write_statement(path: Path, statement: Statement) -> None:
    rundir.write_json(path / "statement.json", to_dict(statement))
    rundir.write_text(path / "statement.md", to_markdown(statement))
