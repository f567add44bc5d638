"""Attacks on the releases and the models of a run; names are imported on first use, since attacks need torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedveil.attacks.attack_options import Attack
    from fedveil.attacks.attack_table import ATTACKS, attack
    from fedveil.attacks.attack_types import (
        AttackStep,
        Bounds,
        CapturedUpload,
        Clip,
        Knowledge,
        KnownTraining,
        Reconstruction,
    )
    from fedveil.attacks.reconstruction import DLG, IDLG, IG, GradientMatching, GradInversion

_MODULES = {
    "attack_options": ("Attack",),
    "attack_table": ("ATTACKS", "attack"),
    "attack_types": ("AttackStep", "Bounds", "CapturedUpload", "Clip", "Knowledge", "KnownTraining", "Reconstruction"),
    "reconstruction": ("DLG", "IDLG", "IG", "GradInversion", "GradientMatching"),
}

__all__ = [
    "ATTACKS",
    "DLG",
    "IDLG",
    "IG",
    "Attack",
    "AttackStep",
    "Bounds",
    "CapturedUpload",
    "Clip",
    "GradInversion",
    "GradientMatching",
    "Knowledge",
    "KnownTraining",
    "Reconstruction",
    "attack",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
