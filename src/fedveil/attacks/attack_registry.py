"""The reconstruction attacks by name, and the settings that a user gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedveil.attacks.reconstruction import Attack
from fedveil.errors import ConfigError
from fedveil.registry import Registry

LEAST: Mapping[str, float] = {
    **dict.fromkeys(
        ("steps", "restarts", "seeds", "targets", "probes", "latent", "fakes", "auxiliary", "epochs", "patience", "judge_epochs"),
        1,
    ),
    **dict.fromkeys(("tolerance", "warmup", "langevin", "matching", "tv", "l2", "bn", "group"), 0),
    **dict.fromkeys(("private", "attacker", "warm"), 0),
}
"""The smallest value of a number; one that is not listed has none."""
ABOVE: Mapping[str, float] = {"lr": 0}
"""What a number must exceed."""
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "line_search": ("strong_wolfe", None),
    "rule": ("gradient", "inversion"),
    "mode": ("passive", "active"),
}


def checked(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All settings, the user's before defaults, in the defaults' types; a default of None stands for a whole number.

    Raises:
        ConfigError: a value of another type, or out of range.
    """
    return {**defaults, **{name: _one(name, value, defaults[name]) for name, value in settings.items()}}


def _one(name: str, value: Any, default: Any) -> Any:
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise _wrong(name, value, " or ".join(str(choice) for choice in CHOICES[name] if choice is not None))
        return value
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value
    if isinstance(default, tuple):
        if not isinstance(value, list | tuple) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise _wrong(name, value, "a list of whole numbers")
        return tuple(value)
    return value if value is None and default is None else _number(name, value, isinstance(default, float))


def _number(name: str, value: Any, real: bool) -> float:
    least, above = LEAST.get(name, -math.inf), ABOVE.get(name, -math.inf)
    kind = float | int if real else int
    if isinstance(value, bool) or not isinstance(value, kind) or not (math.isfinite(value) and value >= least and value > above):
        wanted = "a number" if real else "a whole number"
        reach = f" of at least {least:g}" if name in LEAST else f" above {above:g}" if name in ABOVE else ""
        raise _wrong(name, value, wanted + reach)
    return float(value) if real else int(value)


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"attack.{name} = {value} is not possible: give {wanted}")


ATTACKS: Registry[type[Attack]] = Registry(
    "attack",
    "attack",
    {
        "dlg": "fedveil.attacks.reconstruction:DLG",
        "idlg": "fedveil.attacks.reconstruction:IDLG",
        "ig": "fedveil.attacks.reconstruction:IG",
        "gradinversion": "fedveil.attacks.reconstruction:GradInversion",
        "subspace": "fedveil.attacks.reconstruction:Subspace",
    },
)


def attack(kind: str, **settings: Any) -> Attack:
    """The attack `kind` with its settings; raises ConfigError for an unknown kind or setting, or an impossible value."""
    chosen = ATTACKS.find(kind)
    known = {field.name: field.default for field in fields(chosen)}
    wrong = sorted(set(settings) - set(known))
    if wrong:
        raise ConfigError(f"attack {kind} has no setting {', '.join(wrong)}; it takes {', '.join(known)}")
    return chosen(**checked(settings, known))
