"""`fedveil attack`: attack what a configuration or a run lets out, and leave figures, assumptions and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fedveil.adversary import inference
from fedveil.adversary import model_attacks as model
from fedveil.adversary.attack_options import KNOWS, PUBLIC, Options, Outcome, Tell
from fedveil.adversary.gan_attack import curious_client
from fedveil.adversary.reconstruction import reconstruction
from fedveil.adversary.snapshot import Scene, scene_of
from fedveil.configuration.sections import given_keys
from fedveil.errors import ConfigError, nearest
from fedveil.run import run_directory as rundir

Run = Callable[[str, Scene, Options, Tell], Outcome]


@dataclass(frozen=True)
class Kind:
    """A kind of attack.

    Args:
        run: what does it. takes: options besides seed, round and images. place: where it begins unless a round is given: the
            `first` round, the `last` model, or the first with all rounds `watched` by the attack itself.
    """

    run: Run
    takes: tuple[str, ...] = ()
    place: Literal["first", "last", "watched"] = "first"


_PICTURES = ("batch", "restarts", "steps", "knows", "defence")
KINDS: dict[str, Kind] = {
    "ig": Kind(reconstruction, _PICTURES),
    "dlg": Kind(reconstruction, _PICTURES),
    "idlg": Kind(reconstruction, _PICTURES),
    "gradinversion": Kind(reconstruction, _PICTURES),
    "labels": Kind(inference.labels, ("batch", "knows", "defence")),
    "label-reconstruction": Kind(inference.label_reconstruction, ("knows", "defence")),
    "identification": Kind(inference.identification, _PICTURES),
    "attribute": Kind(model.attribute, place="last"),
    "extraction": Kind(model.extraction, place="last"),
    "gan": Kind(curious_client, ("steps", "batch", "defence"), place="watched"),
}


@dataclass(frozen=True)
class Found:
    """A finished attack: the outcome, and the files that hold it."""

    kind: str
    outcome: Outcome
    record: dict[str, Any]
    files: tuple[Path, ...]


def attack(
    target: str | Path,
    kind: str,
    options: Options | None = None,
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    tell: Tell = lambda done, total, what: None,
) -> Found:
    """Attack a configuration file or a run directory and write attack-<kind>.json and, for pictures, .png.

    Args:
        overrides: section.key=value for a configuration; attack.key=value for a setting of the attack itself.
        out: folder to write to; by default the run directory, or runs/attacks-<configuration>.
        tell: told about progress.

    Raises:
        ConfigError: an unknown kind, an option that the kind does not take, or an attack that does not fit the view.
    """
    target, options = Path(target), options or Options()
    own, rest = _own_settings(overrides)
    options = Options(**{**_shallow(options), "settings": {**options.settings, **own}})
    chosen = _checked(kind, options)
    scene = _scene(target, rest, chosen, options, tell)
    if options.defence == "none":
        scene = scene.without_defence()
    outcome = chosen.run(kind, scene, options, tell)
    record = _record(kind, chosen, target, scene, options, outcome)
    folder = Path(out) if out is not None else (target if target.is_dir() else Path("runs") / f"attacks-{target.stem}")
    return Found(kind, outcome, record, _write(folder, name_of(kind, chosen, options), record, outcome))


def _scene(target: Path, overrides: Sequence[str], chosen: Kind, options: Options, tell: Tell) -> Scene:
    watched = chosen.place == "watched"
    if watched and target.is_dir():
        raise ConfigError(
            f"this attack watches every round, and a run keeps its first and last model only: attack {target / 'config.toml'}"
        )
    round, last = 0 if watched else options.round, chosen.place == "last"
    return scene_of(target, overrides, round, options.seed, last, lambda t, n: tell(t, n, "training"))


def name_of(kind: str, chosen: Kind, options: Options) -> str:
    """Of the files: attacks that differ in round, defence or knowledge lie beside each other."""
    name = f"attack-{kind}"
    if "knows" in chosen.takes and set(options.knows) != set(PUBLIC):
        name += "-knows-" + ("-".join(k for k in KNOWS if k in options.knows) or "nothing")
    name += "" if options.round is None else f"-round-{options.round}"
    return name + ("-no-defence" if options.defence == "none" else "")


def _checked(kind: str, options: Options) -> Kind:
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind}: unknown attack{nearest(kind, KINDS)}; there are {', '.join(KINDS)}")
    given = {
        name
        for name, default in (("batch", None), ("restarts", None), ("steps", None), ("knows", PUBLIC), ("defence", "run"))
        if getattr(options, name) != default
    }
    wrong = sorted(given - set(KINDS[kind].takes))
    if wrong:
        takes = ", ".join(f"--{t}" for t in KINDS[kind].takes) or "none of these options"
        raise ConfigError(f"attack {kind} takes no --{wrong[0]}; it takes {takes}")
    return KINDS[kind]


def _own_settings(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Overrides of the attack (section `attack`) and of the configuration."""
    from fedveil.configuration.config import override

    own: dict[str, Any] = {}
    rest = [item for item in overrides if not item.strip().startswith("attack.")]
    for item in overrides:
        if item.strip().startswith("attack."):
            override(own, item)
    return own.get("attack", {}), rest


def _shallow(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in Options.__dataclass_fields__}


def _record(kind: str, chosen: Kind, target: Path, scene: Scene, options: Options, outcome: Outcome) -> dict[str, Any]:
    """Everything about the attack, ready for JSON."""
    assumptions = [_what(scene, options, chosen), *_known(chosen, options), *outcome.assumptions, _FAILED]
    return {
        "kind": kind,
        "target": str(target),
        "figures": dict(outcome.figures),
        "assumptions": assumptions,
        "attacked": _attacked(scene, options),
        "options": asdict(options),
        **outcome.record,
    }


_FAILED = "a failed attack is no evidence of an epsilon"


def _attacked(scene: Scene, options: Options) -> dict[str, Any]:
    s, config = scene.federation.setting, scene.config
    method = {"method": "none (raw updates)"} if options.defence == "none" else {"method": given_keys(config.method)}
    return {
        **method,
        "data": scene.info.name,
        "model": config.model.section(),
        "dimension": scene.layout.dimension,
        "round": scene.progress.round,
        "view": str(s.scope.view),
        "unit": str(s.scope.unit),
        "adjacency": str(s.scope.adjacency),
        "epsilon": s.epsilon,
        "noise_multiplier": s.noise_multiplier,
        "delta": s.delta,
        "run_seed": config.run.seed,
    }


def _what(scene: Scene, options: Options, chosen: Kind) -> str:
    s, method, t = scene.federation.setting, scene.config.method, scene.progress.round
    where = f"in round {t}" if chosen.place == "first" else f"after {t} rounds"
    if options.defence == "none":
        return f"no defence: updates leave as they are; {scene.info.name}, {scene.config.model.name}, {where}"
    variant = f", {given_keys(method)['variant']}" if "variant" in given_keys(method) else ""
    noise = "" if s.noise_multiplier is None else f", noise multiplier {s.noise_multiplier:.3g}"
    return f"{method.name}{variant} on {scene.info.name}, {s.scope.view} view, {where}{noise}"


def _known(chosen: Kind, options: Options) -> list[str]:
    if "knows" not in chosen.takes:
        return [f"attack seed {options.seed}"]
    known = "; ".join(KNOWS[k] for k in KNOWS if k in options.knows) or "nothing besides"
    return [f"the attacker knows the model, the number of examples, the local steps and: {known}", f"attack seed {options.seed}"]


def _write(folder: Path, name: str, record: dict[str, Any], outcome: Outcome) -> tuple[Path, ...]:
    from fedveil.attacks.pictures import save_comparison

    files = [folder / f"{name}.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rundir.write_json(files[0], record)
        if outcome.originals is not None:
            files.append(save_comparison(folder / f"{name}.png", outcome.originals, outcome.rows, _title(record), outcome.paired))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error
    return tuple(files)


def _title(record: dict[str, Any]) -> str:
    what, floors = str(record["assumptions"][0]), record["figures"].get("floors: mean image, other image")
    return what + (f"\nfloors (mean image, other image): {floors}" if floors else "")
