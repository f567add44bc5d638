"""The reconstruction attacks by the name a user gives."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fedveil.attacks.attempt import Attack
from fedveil.attacks.dlg import DLG, IDLG
from fedveil.attacks.gradinversion import GradInversion
from fedveil.attacks.inverting import IG
from fedveil.attacks.settings import checked
from fedveil.errors import ConfigError

ATTACKS: dict[str, type[Attack]] = {kind.name: kind for kind in (DLG, IDLG, IG, GradInversion)}


def attack(kind: str, **settings: Any) -> Attack:
    """The attack `kind` with its settings; raises ConfigError for an unknown kind or setting, or an impossible value."""
    if kind not in ATTACKS:
        raise ConfigError(f"unknown attack {kind!r}; there are {', '.join(ATTACKS)}")
    known = {field.name: field.default for field in fields(ATTACKS[kind])}
    wrong = sorted(set(settings) - set(known))
    if wrong:
        raise ConfigError(f"attack {kind} has no setting {', '.join(wrong)}; it takes {', '.join(known)}")
    return ATTACKS[kind](**checked(settings, known))
