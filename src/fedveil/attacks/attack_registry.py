"""The reconstruction attacks by the name a user gives."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fedveil.attacks.attempt import Attack
from fedveil.attacks.settings import checked
from fedveil.errors import ConfigError
from fedveil.registry import Registry

ATTACKS: Registry[type[Attack]] = Registry(
    "attack",
    "attack",
    {
        "dlg": "fedveil.attacks.dlg:DLG",
        "idlg": "fedveil.attacks.dlg:IDLG",
        "ig": "fedveil.attacks.inverting:IG",
        "gradinversion": "fedveil.attacks.gradinversion:GradInversion",
        "subspace": "fedveil.attacks.subspace:Subspace",
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
