"""What an adversary does with what a mechanism let out."""

from __future__ import annotations

from fedveil.attacks.dlg import DLG, IDLG
from fedveil.attacks.gradinversion import GradInversion
from fedveil.attacks.inverting import IG
from fedveil.attacks.registry import ATTACKS, attack
from fedveil.attacks.types import Attack, Bounds, Clip, Knowledge, LocalSpec, Progress, Result, Upload

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
