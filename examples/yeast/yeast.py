"""What does a gene of yeast do? 14 functions are learned, any number for each gene, and no single gene shows in the model.

pip install --no-deps -r examples/requirements.txt; python examples/yeast/yeast.py 2.0"""

import sys

import pandas as pd
from river.datasets import Yeast

import fedveil as fv


def load():
    genes = pd.DataFrame([{**measured, **functions} for measured, functions in Yeast()])
    genes["gene"] = range(len(genes))  # genes belong to nobody: each is a client of its own, so clients are records
    labels = [name for name in genes if name.startswith("Class")]
    scales = {name: (0, 0.1) for name in genes if name.startswith("Att")}  # rows have length 1: 1 / sqrt(103)
    return fv.from_frame(genes, target=labels, client="gene", name="yeast", normalise=scales, test={"clients": 0.25})


def configuration(epsilon, seed=1, rounds=40):
    rates = {"optimizer": {"lr": 1.0}, "server_optimizer": {"lr": 10.0}}
    return fv.configure(
        model="linear",
        task="multi-label",
        method=fv.DPFedAvg(clip=0.3) if epsilon else fv.FedAvg(),
        training={"rounds": rounds, "clients_per_round": 450, "evaluate_every": rounds, **rates},
        privacy={"epsilon": epsilon, "delta": 1e-4} if epsilon else {},
        run={"seed": seed},
    )


if __name__ == "__main__":
    result = fv.train(configuration(float(sys.argv[1])), data=load())
    print(f"{result.columns.main.phrase} {result.score:.3f}; {result.privacy.proven}")
