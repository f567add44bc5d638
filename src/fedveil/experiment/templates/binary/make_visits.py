"""Writes starter.csv: which visits of 360 made-up patients were followed by another one, always the same."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

PATIENTS, VISITS = 360, 8

draw = np.random.default_rng(0)
patient = np.repeat(np.arange(PATIENTS), VISITS)
age = draw.integers(20, 90, PATIENTS)[patient]
days = draw.poisson(5, len(patient))
west = draw.random(len(patient)) < 0.5
returned = draw.random(len(patient)) < 1 / (1 + np.exp(2.2 - (age - 50) / 15 - (days - 5) / 3 - west))
with Path(__file__).with_name("starter.csv").open("w", newline="", encoding="utf-8") as out:
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["patient", "age", "days", "ward", "returned"])
    for row in zip(patient, age, days, np.where(west, "west", "east"), np.where(returned, "yes", "no"), strict=True):
        rows.writerow(row)
