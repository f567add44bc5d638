"""Writes starter.csv: made-up readings of 360 people's wearables, always the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

PEOPLE, READINGS = 360, 8

draw = np.random.default_rng(0)
person = np.repeat(np.arange(PEOPLE), READINGS)
activity = draw.integers(0, 3, len(person))
fitness = draw.normal(0, 8, PEOPLE)[person]
heart_rate = np.array([68, 98, 145])[activity] + fitness + draw.normal(0, 9, len(person))
cadence = np.maximum(np.array([0, 105, 165])[activity] + draw.normal(0, 25, len(person)), 0)
skin = np.array([33.4, 32.8, 31.6])[activity] + draw.normal(0, 0.6, len(person))
table = np.column_stack([person, heart_rate.round(), cadence.round(), skin.round(1), activity])
header = "person,heart_rate,cadence,skin_temperature,activity"
np.savetxt(Path(__file__).with_name("starter.csv"), table, "%g", ",", header=header, comments="")
