"""Attacks on the releases and the models of a run."""

from __future__ import annotations

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
