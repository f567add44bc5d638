"""What an adversary does with what a mechanism let out."""

from __future__ import annotations

from fedveil.attacks.attack_registry import ATTACKS, attack
from fedveil.attacks.attack_types import Attack, Bounds, Clip, Knowledge, LocalSpec, Progress, Result, Upload
from fedveil.attacks.dlg import DLG, IDLG
from fedveil.attacks.gradinversion import GradInversion
from fedveil.attacks.inverting import IG

__all__ = [
    "ATTACKS",
    "DLG",
    "IDLG",
    "IG",
    "Attack",
    "Bounds",
    "Clip",
    "GradInversion",
    "Knowledge",
    "LocalSpec",
    "Progress",
    "Result",
    "Upload",
    "attack",
]
