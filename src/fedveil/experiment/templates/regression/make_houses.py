"""Writes starter.csv: what made-up households used for heating, a row a day, always the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

HOUSEHOLDS, DAYS = 360, 8

draw = np.random.default_rng(0)
household = np.repeat(np.arange(HOUSEHOLDS), DAYS)
area = draw.uniform(40, 160, HOUSEHOLDS).round()[household]
built = draw.integers(1920, 2021, HOUSEHOLDS)[household]
outside = draw.normal(4, 6, len(household)).round(1)
loss = area * (2.4 - (built - 1920) / 60) / 40
heating = np.maximum(loss * (20 - outside) * 0.6 + draw.normal(0, 5, len(household)), 0).round(1)
table = np.column_stack([household, area, built, outside, heating])
header = "household,area,built,outside,heating"
np.savetxt(Path(__file__).with_name("starter.csv"), table, "%g", ",", header=header, comments="")
