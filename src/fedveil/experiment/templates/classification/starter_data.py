"""A custom data set: readings of people's wearables, and what each person was doing, from starter.csv."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.load import register
from fedveil.data.sources.raw import RawData

ACTIVITIES = ("resting", "walking", "running")
TEST_FROM = 300
"""People from this number on belong to no client: their readings are the test set."""

INFO = Info(
    name="starter",
    title="heart rate, cadence and skin temperature of 360 people; made up, replace them with yours",
    input_shape=(3,),
    classes=len(ACTIVITIES),
    train_size=2400,
    test_size=480,
    users=TEST_FROM,
    source="written by make_readings.py",
    embedded=True,
    mean=(110.0, 80.0, 32.5),  # typical values, known beforehand: never statistics of the data that are to be protected
    std=(40.0, 70.0, 1.5),
    scale=1.0,
)


@register(INFO)
def read(data_dir: Path | None) -> RawData:
    """starter.csv, from the configured `data.data_dir` or beside this file."""
    path = (data_dir or Path(__file__).parent) / "starter.csv"
    table = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float64)
    people, activity, readings = table[:, 0].astype(np.int64), table[:, 4].astype(np.int64), table[:, 1:4]
    test = people >= TEST_FROM
    return RawData(readings[~test], activity[~test], readings[test], activity[test], users_train=people[~test])
