"""Whether the bits that leave tell more than their values: the float pattern and the low bits of a method's real releases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedveil.accounting.types import Audit
from fedveil.audit.adapter import Case, warmed, worst_pair
from fedveil.audit.float_pattern import audit_float_pattern
from fedveil.audit.integer_bits import audit_integer_bits
from fedveil.mechanism.grid import from_grid
from fedveil.mechanism.plan import Plan
from fedveil.mechanism.plan import Upload as Release

MOST = 200
"""Releases of each world that are looked at: a pattern shows in one."""


@dataclass(frozen=True)
class _World:
    integers: list[np.ndarray]
    floats: list[np.ndarray]


def audit_released_bits(case: Case, rng: np.random.Generator, *, n: int, delta: float, alpha: float) -> Audit | None:
    """Attack the pattern of the released bits of two neighbours; None where floats leave, because nothing is promised.

    Two tests, each at half of alpha: the residues of the integers, and which floats the noise could not have given. Both know the
    two contributions.

    Args:
        n: releases of each world, of which at most `MOST` are drawn. alpha: chance of a wrong bound.
    """
    plan = case.policy.plan(case.released(0), warmed(case, rng))
    if not isinstance(plan, Plan):
        return None
    pair, count = worst_pair(plan, case), max(min(n, MOST), 4)
    absent = torch.zeros_like(case.model)

    def release(world: int) -> Release:
        return case.release(pair[world] if case.joins(rng) else absent, plan, 0, rng)

    drawn = [[release(world) for _ in range(count)] for world in (0, 1)]
    if drawn[0][0].integers is None:
        return None
    worlds = [_World([_integers(r) for r in each], [r.vector.numpy() for r in each]) for each in drawn]
    door = case.door(rng)
    extras, finer = torch.zeros(door.parts.dimension - len(absent)), 2**plan.mechanism.shift
    m0, m1 = (door.gridded(torch.cat([u, extras]), door.terms(plan)) * finer for u in pair)
    bits = audit_integer_bits(worlds[0].integers, worlds[1].integers, m1 - m0, alpha=alpha / 2, delta=delta)
    known = [from_grid(m, door.parts.grid(plan)).numpy()[: len(absent)] for m in (m0, m1)]
    std = float(drawn[0][0].noise_std[drawn[0][0].noise_std > 0].min())
    floats = audit_float_pattern(worlds[0].floats, worlds[1].floats, std, (known[0], known[1]), alpha / 2, delta)
    epsilon = max(bits.epsilon, floats.epsilon)
    note = f"p = {min(1.0, 2 * min(bits.p_value, floats.p_value)):.2g} that the two worlds' bits have one law"
    return Audit(epsilon, delta, case.scope, "float pattern and low bits of what left", 1 - alpha, 2 * count, note=note)


def _integers(release: Release) -> np.ndarray:
    assert release.integers is not None
    return release.integers.numpy()
