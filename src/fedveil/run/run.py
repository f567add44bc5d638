"""Run one configuration from start to end and leave a run directory behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedveil.run.run_directory as rundir
from fedveil.configuration.plugins import digests
from fedveil.configuration.public_setting import calibrated_setting, described, objective_of
from fedveil.data.dataset import strata
from fedveil.engines.device import GPU
from fedveil.engines.select_engine import engine, place, settled
from fedveil.errors import ConfigError, FedveilError
from fedveil.federation.checkpoint import Checkpoints
from fedveil.federation.evaluate import handed_over
from fedveil.federation.fit import fit
from fedveil.federation.history import ALL_FAILED, Columns, Record, declared, hidden
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.selection_score import release_score
from fedveil.flower.simulation import FlowerSimulation
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Ledger
from fedveil.run.assembly import Prepared, federation, new_run_id, prepare, with_isolation
from fedveil.run.binding import check_opening, conclude, opening
from fedveil.run.data_card import HandedOver, check_data, how_to_resume, recorded, same_handed_over, write_card
from fedveil.run.history_files import append_history, write_history
from fedveil.run.rehearsal import rehearsed_model
from fedveil.run.result import Result, Trivial, trivial_of
from fedveil.run.resume import count_spent, identity, resumable, run_id_of, same_run
from fedveil.run.run_lock import claimed
from fedveil.run.saving import SavedRounds, SavingEngine
from fedveil.run.shared_budget import affordable, check_plan, run_name, shared_budget
from fedveil.run.spending import spending_of
from fedveil.run.tracked_values import Begun
from fedveil.run.tracking import Tracker, following, tracker_named
from fedveil.statement.certify import certify
from fedveil.statement.public_values import TOGETHER, public_values
from fedveil.statement.statement import Statement
from fedveil.statement.statement_json import to_dict
from fedveil.statement.statement_markdown import to_markdown
from fedveil.training.cores import process_state

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from fedveil.configuration.config import Config
    from fedveil.data.dataset import Dataset
    from fedveil.data.partition import Partition
    from fedveil.federation.engine import Engine


@process_state()
def run(
    config: Config,
    out: str | Path | None = None,
    on_round: Callable[[Record], None] | None = None,
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
        resume: go on with the interrupted run in `out`, from its last finished round.
        track: trackers that follow the run, besides those that the configuration names (see `trackers`).

    Raises:
        ConfigError, DataError: before anything is trained. FedveilError: the run directory cannot be written.
        BudgetExhausted: what is planned exceeds what is left of privacy.budget; nothing was trained.
    """
    refuse_secret_search(config)
    handed_over = HandedOver(data, partition)
    place(config.run.engine, config.training.client_timeout)
    if resume:
        if out is None:
            raise ConfigError("resuming needs the run directory: give out")
        same_handed_over(saved := resumable(Path(out)), handed_over, Path(out))
        same_run(saved, recorded(config, handed_over), Path(out), but_model=not config.model.plain)
    prepared = prepare(config := recorded(config, handed_over), data, partition)
    return run_prepared(config, prepared, out, on_round, resume=resume, track=track)


@process_state()
def run_prepared(
    config: Config,
    prepared: Prepared,
    out: str | Path | None,
    on_round: Callable[[Record], None] | None = None,
    *,
    resume: bool = False,
    track: Sequence[Tracker] = (),
    clients: Callable[[str], Callable[[Federation], Engine]] | None = None,
) -> Result:
    """As `run`, with data that are there already.

    Args:
        clients: called with the run's id before anything is written into its directory; what it returns makes the engine that
            reaches the clients. Left out: the configured one.
    """
    trackers = [*track, *(tracker_named(name) for name in config.run.track)]
    saved = resumable(Path(out)) if resume and out is not None else None
    begun_with = None if saved is None else saved.run.engine
    if config.run.engine == "auto" and begun_with == "stacked":
        config = _with_engine(config, "stacked")
    device = "cpu"
    if begun_with is None or begun_with in TOGETHER or config.run.engine != "auto":
        device = place(config.run.engine, config.training.client_timeout)
    if config.run.engine == "auto" and device == GPU:
        config = _with_engine(config, "cuda")  # the statement says what that assumes
    config = described(config, prepared.dataset.info)
    if saved is not None and out is not None:
        same_run(saved, config, Path(out))
        config = _with(config, isolation=saved.run.isolation)
    method, setting = calibrated_setting(config, prepared.population)
    config = with_isolation(config)
    vacuous, seeded = config.privacy.allow_vacuous_delta, config.run.seeded_noise
    batch_norm = config.model.keeps_statistics
    begun_as = config if begun_with not in TOGETHER else _with_engine(config, str(begun_with))  # its rounds rest on that
    public = public_values(begun_as, prepared.dataset.info)
    statement = certify(method, setting, seeded_noise=seeded, allow_vacuous_delta=vacuous, batch_norm=batch_norm, public=public)
    model = rehearsed_model(config, prepared, (method, setting)).to(device)
    trivial = trivial_of(setting.task, prepared.test[1])
    if not resume:
        own, timeout = objective_of(config, method, setting), config.training.client_timeout
        config = _with_engine(config, settled(config.run.engine, model, own, setting, timeout))
    run_id = new_run_id()
    shared = shared_budget(config, setting) if resume else affordable(config, method, setting, run_id)
    path = Path(out) if out is not None else Path("runs") / f"{method.name}-{prepared.dataset.info.name}-{run_id}"
    if not resume:
        with _writable(path):
            rundir.create(path)
    with claimed(path):
        if resume:
            resumable(path)
            check_data(path, prepared)
            check_opening(path)
            run_id = run_id_of(path)
            if shared is not None:
                check_plan(shared, method, setting, run_name(config, run_id))
        reached = None if clients is None else clients(run_id)
        if not resume:
            _begin(path, config, prepared, statement, run_id)
        checkpoints = Checkpoints(path / "checkpoint", identity(run_id, prepared, config.code), path / "ledger.sqlite")
        progress = checkpoints.load()
        population = None if shared is None else shared.ledger(run_name(config, run_id))
        job = federation(config, prepared, path / "ledger.sqlite", run_id, model, (method, setting), population)
        if config.training.personal_on_test_set and config.run.engine != "flower":  # whose clients keep their own models
            job = replace(job, personal_on_test_set=True)
        history, columns = (
            progress.history if progress is not None else [],
            declared(job.context.task, job.context.objective, job.context.policy.part),
        )
        columns = columns.hiding(hidden(method, setting, columns))
        begun = Begun(run_id, path, config, statement, setting.layout.names, history, columns)
        with following(trackers, begun) as tracked:
            listeners = [tracked] if on_round is None else [tracked, on_round]
            return _train(job, begun, checkpoints, progress, listeners, reached, trivial)


def _with_engine(config: Config, name: str) -> Config:
    return _with(config, engine=name)


def _with(config: Config, **keys: Any) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update=keys)})


def refuse_secret_search(config: Config) -> None:
    """An error where the configuration is that of the best of a secret number of runs: one run alone is none."""
    if (selection := config.privacy.selection) is not None and selection.shape is not None:
        raise ConfigError(
            "privacy.selection.shape: this configuration is that of a run which private selection chose, and one run alone has "
            "not been chosen: leave privacy.selection out, or search with fedveil tune --private"
        )


def _configured(config: Config, path: Path) -> Callable[[Federation], Engine]:
    """The engine that the configuration names."""
    section, timeout = config.run, config.training.client_timeout
    at_once, deterministic = section.clients_at_once, section.deterministic

    def made(job: Federation) -> Engine:
        if section.engine == "flower":
            return FlowerSimulation(job.context, rundir.private_folder(path) / "clients", timeout)
        return engine(section.engine, job.context, timeout, at_once=at_once, deterministic=deterministic)

    return made


def _train(
    job: Federation,
    begun: Begun,
    saved: Checkpoints,
    progress: Progress | None,
    listeners: Sequence[Callable[[Record], None]],
    clients: Callable[[Federation], Engine] | None,
    trivial: Trivial | None,
) -> Result:
    """Train to the end, save and report each round, and write the rest of the run directory."""
    config, path = begun.config, begun.path
    runner = (clients or _configured(config, path))(job)
    beside = clients is None and config.run.engine != "flower"  # there clients charge and send while others train
    progress = progress or start(job)
    if config.privacy.max_participations is not None and not config.run.seeded_noise:
        count_spent(progress, path)
    layout, columns = job.context.door.layout, begun.columns
    with _safe(begun):
        write_history(path, progress.history, layout, columns)
    note_spent = spending_of(job, begun.statement)

    def report() -> None:
        with _safe(begun):
            append_history(path, progress.history, layout, columns)
        for listener in listeners:
            listener(progress.history[-1])

    rounds = SavedRounds(saved, report, beside=beside)

    def after(progress: Progress) -> None:
        note_spent(progress.history[-1])
        rounds.save(progress)

    try:
        try:
            ended = fit(job, SavingEngine(runner, rounds), progress, after)
        finally:
            rounds.finish()
        score = release_score(job, progress)
    except KeyboardInterrupt as stop:
        stop.add_note(f"interrupted; {saved.rounds} rounds are saved: {how_to_resume(path, config)} goes on from there")
        raise
    finally:
        if isinstance(job.context.door.ledger, BudgetedLedger):
            job.context.door.ledger.close()
    model = handed_over(job, progress).to("cpu")
    model.eval()
    result = Result(
        model, progress.history, begun.statement, path, ended, columns=columns, selection_score=score, trivial=trivial
    )
    if ended.startswith(ALL_FAILED):
        _log.warning("%s: the run has ended: %s", path, "; ".join((ended, *result.warnings)))
    with _safe(begun):
        write_history(path, progress.history, layout, columns)
        rundir.write_model(path / "model.safetensors", model.saved())
        whole, shown = summaries(result, begun.run, columns)
        rundir.write_json(rundir.private_folder(path) / "summary.json", whole)
        summary = rundir.json_text(shown).encode()
        closing = conclude(path, len(progress.history), ended, {"summary.json": summary})
        rundir.write_bytes(path / "summary.json", summary)
    return replace(result, closing=closing)


def _begin(path: Path, config: Config, prepared: Prepared, statement: Statement, run_id: str) -> None:
    """Make the run directory; the ledger comes last, and with it the run can be resumed."""
    with _writable(path):
        rundir.create(path)
        rundir.write_versions(path / "versions.json", digests(config.code))
        rundir.write_config(path / "config.toml", config)
        _write_statement(path, statement)
        info = prepared.dataset.info
        labels = strata(info, prepared.dataset.y_train)
        write_card(path, config, prepared)
        rundir.write_partition(rundir.private_folder(path) / "partition.json", prepared.partition, labels, info.strata)
    searched = config.privacy.selection is not None and config.privacy.selection.shape is not None
    created = 0.0 if searched else None  # when the best of several runs began tells how many ran before it
    Ledger.create(path / "ledger.sqlite", run_id, opening(path, config.method.name), created=created).close()


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise ConfigError(f"cannot write the run directory {path}: {problem.strerror}; choose another --out") from problem


@contextmanager
def _safe(begun: Begun) -> Iterator[None]:
    """Explain a failed write once rounds are saved: nothing is lost."""
    try:
        yield
    except OSError as problem:
        raise FedveilError(
            f"cannot write {problem.filename or begun.path}: {problem.strerror or problem}; all finished rounds are safe in "
            f"{begun.path / 'checkpoint'}: make room or give permission, then go on with "
            f"{how_to_resume(begun.path, begun.config)}"
        ) from problem


def summaries(result: Result, run_id: str, columns: Columns) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run in a few numbers (`private/summary.json`), and the public ones among them (`summary.json`)."""
    last = {k: v for k, v in result.history[-1].items() if not isinstance(v, list | dict)} if result.history else {}
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
    shown = Columns(columns.own)  # the last model is released in every view, and with it its scores
    public = {k: v for k, v in last.items() if columns[k].public or (k.startswith("test_") and shown[k].public)}
    return whole, {k: v for k, v in whole.items() if k != "seconds"} | {"final": public}


def _write_statement(path: Path, statement: Statement) -> None:
    rundir.write_json(path / "statement.json", to_dict(statement))
    rundir.write_text(path / "statement.md", to_markdown(statement))
