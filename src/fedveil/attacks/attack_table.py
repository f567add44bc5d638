"""The table of attacks by name; an attack is imported on lookup, and its settings are checked on creation."""

from __future__ import annotations

import math
from dataclasses import Field, fields
from typing import Any

from fedveil.attacks.attack_options import Attack, AttackOptions
from fedveil.errors import ConfigError
from fedveil.registry import Registry

ATTACKS: Registry[type[Attack]] = Registry(
    "attack",
    "attack",
    {
        "ig": "fedveil.attacks.reconstruction:IG",
        "dlg": "fedveil.attacks.reconstruction:DLG",
        "idlg": "fedveil.attacks.reconstruction:IDLG",
        "gradinversion": "fedveil.attacks.reconstruction:GradInversion",
        "subspace": "fedveil.attacks.reconstruction:Subspace",
        "labels": "fedveil.attacks.release_attacks:LabelCounts",
        "label-reconstruction": "fedveil.attacks.release_attacks:SingleLabels",
        "identification": "fedveil.attacks.release_attacks:Senders",
        "attribute": "fedveil.attacks.model_attacks:AttributeProbe",
        "extraction": "fedveil.attacks.model_attacks:KnowledgeExtraction",
        "gan": "fedveil.attacks.gan_attack:GanAttack",
    },
)


def attack(kind: str, **settings: Any) -> Attack:
    """Return the attack `kind` with its settings. Raises ConfigError for an unknown kind or setting, or an invalid value."""
    chosen = ATTACKS.find(kind)
    known = {f.name: f for f in fields(chosen)}
    for name in sorted(set(settings) - set(known)):
        raise ConfigError(f"attack {kind} has no setting {name}; it takes {', '.join(known) or 'none'}")
    return chosen(**{name: _checked(name, value, known[name]) for name, value in settings.items()})


def _checked(name: str, value: Any, declared: Field[Any]) -> Any:
    """Return the value in the type of the setting's default, where None stands for a whole number."""
    default, choices = declared.default, declared.metadata.get("choices")
    least, above = (declared.metadata.get(key) for key in ("least", "above"))
    if choices:
        allowed, fits = " or ".join(str(choice) for choice in choices if choice is not None), value in choices
    elif isinstance(default, bool):
        allowed, fits = "true or false", isinstance(value, bool)
    elif isinstance(default, tuple):
        allowed, fits = "a list of whole numbers", isinstance(value, list | tuple) and all(type(v) is int for v in value)
        value = tuple(value) if fits else value
    else:
        real = isinstance(default, float)
        reach = f" of at least {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
        allowed, fits = ("a number" if real else "a whole number") + reach, value is None and default is None
        if not fits and isinstance(value, int | float if real else int) and not isinstance(value, bool):
            fits = math.isfinite(value) and (least is None or value >= least) and (above is None or value > above)
            value = float(value) if real else value
    if not fits:
        raise ConfigError(f"attack.{name} = {value} is not possible: give {allowed}")
    return value


def configured(kind: str, options: AttackOptions) -> Attack:
    """Return the attack of that name with its settings. Raises ConfigError for an option that it does not accept."""
    chosen, defaults = ATTACKS.find(kind, "--kind"), AttackOptions()
    changed = {n for n in ("batch", "restarts", "steps", "knows", "defence") if getattr(options, n) != getattr(defaults, n)}
    for option in sorted(changed - set(chosen.takes)):
        takes = ", ".join(f"--{t}" for t in chosen.takes) or "none of these options"
        raise ConfigError(f"attack {kind} takes no --{option}; it takes {takes}")
    if options.examples not in ("drawn", *chosen.examples):
        raise ConfigError(
            f"attack.examples = {options.examples!r}: attack {kind} takes {' or '.join(('drawn', *chosen.examples))}"
        )
    return attack(kind, **chosen.settings(options))
