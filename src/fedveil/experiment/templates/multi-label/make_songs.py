"""Writes starter.csv: which labels made-up listeners gave to songs, always the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LISTENERS, SONGS = 360, 8

draw = np.random.default_rng(0)
listener = np.repeat(np.arange(LISTENERS), SONGS)
tempo = draw.normal(120, 30, len(listener)).round()
minor = draw.integers(0, 2, len(listener))
volume = draw.uniform(0, 1, len(listener)).round(2)
odds = np.column_stack([(tempo - 120) / 10 + 2 * volume - 1, 4 * minor - 2 - (tempo - 120) / 20, 12 * (volume - 0.5)])
labels = draw.random(odds.shape) < 1 / (1 + np.exp(-odds))
table = np.column_stack([listener, tempo, minor, volume, labels])
header = "listener,tempo,minor,volume,dance,sad,loud"
np.savetxt(Path(__file__).with_name("starter.csv"), table, "%g", ",", header=header, comments="")
