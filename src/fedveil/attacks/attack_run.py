"""Run an attack on a configuration or a run directory, and write its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedveil.attacks.attack_options import KNOWS, PUBLIC, Attack, AttackOptions, AttackOutcome, OnProgress
from fedveil.attacks.attack_table import ATTACKS, configured
from fedveil.attacks.metrics import save_comparison
from fedveil.attacks.snapshot import Snapshot, snapshot_of, target_of
from fedveil.errors import ConfigError
from fedveil.experiment import run_directory as rundir
from fedveil.experiment.assembly import Prepared
from fedveil.experiment.config import override
from fedveil.experiment.config_files import with_model
from fedveil.experiment.data_card import NOTHING, HandedOver, reopened
from fedveil.experiment.experiment import Experiment
from fedveil.experiment.resolve import opened
from fedveil.experiment.sections import given_keys
from fedveil.ledger.files import replace_whole
from fedveil.tasks.classification import Classification
from fedveil.training.cores import process_state

if TYPE_CHECKING:
    from fedveil.methods.base import MethodConfig
    from fedveil.methods.method import Method


_FAILED = "a failed attack is no evidence of an epsilon"


def _record_of(
    chosen: Attack, target: Path, snapshot: Snapshot, options: AttackOptions, outcome: AttackOutcome
) -> dict[str, Any]:
    """Return the record of an attack, ready for JSON."""
    assumptions = [_attacked(snapshot, options, chosen), *_knowledge_sentences(options, chosen), *outcome.assumptions, _FAILED]
    s, experiment = snapshot.federation.setting, snapshot.experiment
    return {
        "kind": chosen.name,
        "target": str(target),
        "figures": dict(outcome.figures),
        "assumptions": assumptions,
        "attacked": {
            "method": "none (raw updates)" if options.defence == "none" else _given_options(experiment.method),
            "data": snapshot.info.name,
            "model": experiment.network.section(),
            "dimension": snapshot.layout.dimension,
            "round": snapshot.progress.round,
            "view": str(s.scope.view),
            "unit": str(s.scope.unit),
            "adjacency": str(s.scope.adjacency),
            "epsilon": s.epsilon,
            "noise_multiplier": s.noise_multiplier,
            "delta": s.delta,
            "run_seed": experiment.seed,
        },
        "options": asdict(options),
        **outcome.record,
    }


def _attacked(snapshot: Snapshot, options: AttackOptions, chosen: Attack) -> str:
    s, method, t = snapshot.federation.setting, snapshot.experiment.method, snapshot.progress.round
    where = f"in round {t}" if chosen.place == "first" else f"after {t} rounds"
    if options.defence == "none":
        return f"no defence: updates leave as they are; {snapshot.info.name}, {snapshot.experiment.network.name}, {where}"
    variant = ", published" if _given_options(method).get("variant") == "published" else ""
    noise = "" if s.noise_multiplier is None else f", noise multiplier {s.noise_multiplier:.3g}"
    return f"{method.name}{variant} on {snapshot.info.name}, {s.scope.view} view, {where}{noise}"


def _given_options(method: Method) -> dict[str, Any]:
    """Return the method's name and the options that were given."""
    return given_keys(cast("MethodConfig", method))


def _knowledge_sentences(options: AttackOptions, chosen: Attack) -> list[str]:
    seed = f"attack seed {options.seed}"
    if "knows" not in chosen.takes:
        return [seed]
    known = "; ".join(KNOWS[k] for k in KNOWS if k in options.knows) or "nothing besides"
    return [f"the attacker knows the model, the number of examples, the local steps and: {known}", seed]


def write(folder: Path, name: str, record: dict[str, Any], outcome: AttackOutcome) -> tuple[Path, ...]:
    """Write the record and, for images, a picture. Raises ConfigError if the folder cannot be written."""
    files = [folder / f"{name}.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if outcome.originals is not None:
            files.append(save_comparison(folder / f"{name}.png", outcome.originals, outcome.rows, _title(record), outcome.paired))
        replace_whole(files[0], rundir.json_text(record).encode(), private=True)  # after the picture that it describes
    except OSError as error:
        figures = "; ".join(f"{name} {value}" for name, value in outcome.figures.items())
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another --out. Found: {figures}") from error
    return tuple(files)


def _title(record: dict[str, Any]) -> str:
    what, floors = str(record["assumptions"][0]), record["figures"].get("floors: mean image, other image")
    return what + (f"\nfloors (mean image, other image): {floors}" if floors else "")


@dataclass(frozen=True)
class FinishedAttack:
    """A finished attack: its outcome, its record and the written files."""

    kind: str
    outcome: AttackOutcome
    record: dict[str, Any]
    files: tuple[Path, ...]


def silent(done: int, total: int, what: str) -> None:
    """Ignore progress."""


@process_state()
def attack(
    target: str | Path,
    kind: str,
    options: AttackOptions | None = None,
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    on_progress: OnProgress = silent,
    handed_over: HandedOver = NOTHING,
) -> FinishedAttack:
    """Attack a configuration file or a run directory and write attack-<kind>.json and, for pictures, .png.

    Args:
        overrides: section.key=value for a key of the configuration; attack.key=value for a setting of the attack.
        out: output folder; by default the run directory, or runs/attacks-<configuration>.
        handed_over: data, partition and model that a program passed to the run.

    Raises:
        ConfigError: the kind is unknown or does not accept an option, the attack does not fit the view, or the data are not
            those of the run.
    """
    target, options = Path(target), options or AttackOptions()
    settings, config_overrides = _own_settings(overrides)
    examples = settings.pop("examples", options.examples)
    options = replace(options, settings={**options.settings, **settings}, examples=examples)
    chosen = configured(kind, options)
    if chosen.place == "watched" and target.is_dir():
        raise ConfigError(
            f"this attack watches every round, and a run keeps its first and last model only: attack {target / 'config.toml'}"
        )
    config, run = target_of(target, config_overrides)
    if handed_over.model is not None:
        config = with_model(config, handed_over.model)
    experiment, prepared = opened(config, handed_over.data, handed_over.partition) if run is None else reopened(run, handed_over)
    snapshot, outcome = attacked(kind, options, experiment, prepared, run, on_progress=on_progress)
    record = _record_of(chosen, target, snapshot, options, outcome)
    folder = Path(out) if out is not None else (target if target.is_dir() else Path("runs") / f"attacks-{target.stem}")
    return FinishedAttack(kind, outcome, record, write(folder, name_of(kind, options), record, outcome))


@process_state()
def attacked(
    kind: str,
    options: AttackOptions,
    experiment: Experiment,
    prepared: Prepared,
    run: Path | None = None,
    *,
    last: bool | None = None,
    on_progress: OnProgress = silent,
) -> tuple[Snapshot, AttackOutcome]:
    """Attack an experiment, or the saved states of a run of it, and write nothing.

    Args:
        last: if the options give no round, whether to attack after the last round; by default as the kind declares.

    Raises:
        ConfigError: for the reasons that `attack` lists.
    """
    chosen = configured(kind, options)
    round = 0 if chosen.place == "watched" else options.round
    at_the_end = chosen.place == "last" if last is None else last
    snapshot = snapshot_of(
        experiment,
        prepared,
        run,
        round=round,
        last=at_the_end,
        seed=options.seed,
        on_round=lambda t, n: on_progress(t, n, "training"),
    )
    _need_plain_classes(kind, snapshot)
    if options.examples == "test" and chosen.place == "first":
        snapshot = snapshot.one_step()
    if options.defence == "none":
        snapshot = snapshot.without_defence()
    return snapshot, chosen.on(snapshot, options, on_progress)


def _need_plain_classes(kind: str, snapshot: Snapshot) -> None:
    """Refuse a run unless it trains with plain cross-entropy and one class per example, which is all that attacks support."""
    task = snapshot.federation.context.task
    if task != Classification() or snapshot.info.vocabulary:
        what = "tokens" if snapshot.info.vocabulary else ", ".join(f"task.{k} = {v!r}" for k, v in given_keys(task).items())
        raise ConfigError(
            f"attack {kind} inverts plain cross-entropy of one class for each example, over inputs that are quantities; this run "
            f"learns {what}. What any attack can learn is bounded by the statement, and tested by fedveil audit"
        )


def name_of(kind: str, options: AttackOptions) -> str:
    """Return the file name without suffix. It contains round, examples, defence and knowledge unless they have their defaults."""
    name = f"attack-{kind}"
    if "knows" in ATTACKS[kind].takes and set(options.knows) != set(PUBLIC):
        name += "-knows-" + ("-".join(k for k in KNOWS if k in options.knows) or "nothing")
    name += "" if options.round is None else f"-round-{options.round}"
    name += "" if options.examples == "drawn" else f"-examples-{options.examples}"
    return name + ("-no-defence" if options.defence == "none" else "")


def _own_settings(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the overrides into those of the section `attack` and those of the configuration."""
    settings: dict[str, Any] = {}
    rest = [item for item in overrides if not item.strip().startswith("attack.")]
    for item in overrides:
        if item not in rest:
            override(settings, item)
    return settings.get("attack", {}), rest
