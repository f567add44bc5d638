"""Writes starter.csv: how long made-up pumps of 360 plants ran, always the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

PLANTS, PUMPS = 360, 8

draw = np.random.default_rng(0)
plant = np.repeat(np.arange(PLANTS), PUMPS)
load = draw.uniform(20, 100, len(plant)).round()
temperature = draw.normal(60, 12, len(plant)).round()
serviced = draw.integers(0, 2, len(plant))
risk = 0.03 * (load - 60) + 0.05 * (temperature - 60) - 0.8 * serviced
fails, seen_until = draw.exponential(30 * np.exp(-risk)), draw.uniform(6, 48, len(plant))
months = np.maximum(np.minimum(fails, seen_until), 0.1).round(1)
table = np.column_stack([plant, load, temperature, serviced, months, fails <= seen_until])
header = "plant,load,temperature,serviced,months,failed"
np.savetxt(Path(__file__).with_name("starter.csv"), table, "%g", ",", header=header, comments="")
