"""What an adversary does with what a mechanism let out."""

from __future__ import annotations

from fedveil.attacks.attack_registry import ATTACKS, attack
from fedveil.attacks.attack_types import (
    AttackStep,
    Bounds,
    CapturedUpload,
    Clip,
    Knowledge,
    KnownTraining,
    Reconstruction,
)
from fedveil.attacks.attempt import Attack
from fedveil.attacks.dlg import DLG, IDLG
from fedveil.attacks.gradinversion import GradInversion
from fedveil.attacks.inverting import IG

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
    "Knowledge",
    "KnownTraining",
    "Reconstruction",
    "attack",
]
