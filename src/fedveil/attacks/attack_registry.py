"""The reconstruction attacks by the name a user gives."""

from __future__ import annotations

from typing import Any

from fedveil.attacks.attack_types import Attack
from fedveil.attacks.dlg import DLG, IDLG
from fedveil.attacks.gradinversion import GradInversion
from fedveil.attacks.inverting import IG
from fedveil.attacks.settings import checked
from fedveil.errors import ConfigError

ATTACKS: dict[str, type[DLG] | type[IDLG] | type[IG] | type[GradInversion]] = {
    "dlg": DLG,
    "idlg": IDLG,
    "ig": IG,
    "gradinversion": GradInversion,
}


def attack(kind: str, **settings: Any) -> Attack:
    """The attack `kind` with its settings; raises ConfigError for an unknown kind or setting, or an impossible value."""
    if kind not in ATTACKS:
        raise ConfigError(f"unknown attack {kind!r}; there are {', '.join(ATTACKS)}")
    known = ATTACKS[kind].__dataclass_fields__
    wrong = sorted(set(settings) - set(known))
    if wrong:
        raise ConfigError(f"attack {kind} has no setting {', '.join(wrong)}; it takes {', '.join(known)}")
    made: Attack = ATTACKS[kind](**checked(settings, {name: field.default for name, field in known.items()}))
    return made
