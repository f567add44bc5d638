"""What is kept of an attack: its record, ready for JSON, with assumptions as sentences, and its files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedveil.adversary.attack_options import KNOWS, AttackOptions, AttackOutcome
from fedveil.attacks.pictures import save_comparison
from fedveil.configuration.sections import given_keys
from fedveil.errors import ConfigError
from fedveil.ledger.whole_files import replace_whole
from fedveil.run import run_directory as rundir

if TYPE_CHECKING:
    from fedveil.adversary.snapshot import Snapshot
    from fedveil.methods.base import MethodConfig
    from fedveil.methods.method import Method

_FAILED = "a failed attack is no evidence of an epsilon"


def record_of(
    kind: str, target: Path, snapshot: Snapshot, options: AttackOptions, outcome: AttackOutcome, during: bool, knows: bool
) -> dict[str, Any]:
    """Everything about the attack.

    Args:
        during: whether a round is attacked, not the model after it. knows: whether the kind takes what the attacker knows.
    """
    assumptions = [_attacked(snapshot, options, during), *_known(options, knows), *outcome.assumptions, _FAILED]
    s, experiment = snapshot.federation.setting, snapshot.experiment
    return {
        "kind": kind,
        "target": str(target),
        "figures": dict(outcome.figures),
        "assumptions": assumptions,
        "attacked": {
            "method": "none (raw updates)" if options.defence == "none" else _given(experiment.method),
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


def _attacked(snapshot: Snapshot, options: AttackOptions, during: bool) -> str:
    s, method, t = snapshot.federation.setting, snapshot.experiment.method, snapshot.progress.round
    where = f"in round {t}" if during else f"after {t} rounds"
    if options.defence == "none":
        return f"no defence: updates leave as they are; {snapshot.info.name}, {snapshot.experiment.network.name}, {where}"
    variant = ", published" if _given(method).get("variant") == "published" else ""
    noise = "" if s.noise_multiplier is None else f", noise multiplier {s.noise_multiplier:.3g}"
    return f"{method.name}{variant} on {snapshot.info.name}, {s.scope.view} view, {where}{noise}"


def _given(method: Method) -> dict[str, Any]:
    """Return the method's name and the options that were given."""
    return given_keys(cast("MethodConfig", method))


def _known(options: AttackOptions, knows: bool) -> list[str]:
    own = f"attack seed {options.seed}"
    if not knows:
        return [own]
    known = "; ".join(KNOWS[k] for k in KNOWS if k in options.knows) or "nothing besides"
    return [f"the attacker knows the model, the number of examples, the local steps and: {known}", own]


def write(folder: Path, name: str, record: dict[str, Any], outcome: AttackOutcome) -> tuple[Path, ...]:
    """The record and, where there is something to see, a picture; raises ConfigError for a folder that cannot be written."""
    files = [folder / f"{name}.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if outcome.originals is not None:
            files.append(save_comparison(folder / f"{name}.png", outcome.originals, outcome.rows, _title(record), outcome.paired))
        replace_whole(files[0], rundir.json_text(record).encode(), private=True)  # last: it says what its picture shows
    except OSError as error:
        found = "; ".join(f"{name} {value}" for name, value in outcome.figures.items())
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another --out. Found: {found}") from error
    return tuple(files)


def _title(record: dict[str, Any]) -> str:
    what, floors = str(record["assumptions"][0]), record["figures"].get("floors: mean image, other image")
    return what + (f"\nfloors (mean image, other image): {floors}" if floors else "")
