"""Writes starter.csv: made-up sentences of 360 people, always the same."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

PEOPLE, SENTENCES = 360, 8
PARTS = (
    ("we", "they", "you"),
    ("met", "saw", "called", "missed"),
    ("the",),
    ("doctor", "nurse", "patient"),
    ("on", "before", "after"),
    ("monday", "tuesday", "friday"),
)

draw = np.random.default_rng(0)
rows = [(person, " ".join(map(draw.choice, PARTS))) for person in range(PEOPLE) for _ in range(SENTENCES)]
with Path(__file__).with_name("starter.csv").open("w", newline="", encoding="utf-8") as file:
    csv.writer(file).writerows([("person", "sentence"), *rows])
