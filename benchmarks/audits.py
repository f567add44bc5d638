"""Every audit on mechanisms of known epsilon, measured beside the reference figures.

    python benchmarks/audits.py            # all tables, about a minute on one core
    python benchmarks/audits.py one_run    # one of them

Tables: single_upload, two_worlds, power, one_run, client_canaries, linear_loss, dp_sgd, masks, soundness, ceilings. Each prints
Markdown; a measured cell is mean +- standard deviation over the stated number of repeats; "ref" is the figure it is held against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fedveil.accounting import gaussian
from fedveil.audit import worlds
from fedveil.audit.adapter import Case
from fedveil.audit.canaries import (
    Guesses,
    canaries,
    ceiling,
    choose_guesses,
    epsilon_bound,
    estimate,
    final_scores,
    guess,
    mu_bound,
    simulate_gaussian,
    symmetric_grid,
    threshold_bound,
)
from fedveil.audit.dp_sgd_audit import DpSgdClient, audit_canaries, audit_two_worlds
from fedveil.audit.single_upload import single_upload
from fedveil.audit.subject import Subject, epsilon_ceiling
from fedveil.audit.training_audit import Trainer, pairs, supports_given_releases
from fedveil.audit.two_world import Rates, choose_threshold, rates
from fedveil.experiment.config import parse
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.papers.convergent_dp.audit import LinearRun, audit_linear_loss
from harness import arguments, markdown, mean_and_spread

DELTA = 1e-5
ALPHA = 0.05


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """One table under its title."""
    print(f"\n### {title}\n\n{markdown(head, rows)}")


def cell(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return mean_and_spread(values, 2, "+-")


def single() -> None:
    rows = []
    subjects: list[tuple[Subject, float, str]] = [
        (worlds.plain_gaussian(), DELTA, "clean; .47, GDP 1.58"),
        (worlds.ladp_below_threshold(), DELTA, "inf"),
        (worlds.fedanc(), DELTA, "inf; 5.60"),
        (worlds.fedanc(masked=True), DELTA, "inf; 5.15"),
        (worlds.private_mask(), DELTA, "inf; 4.90"),
        (worlds.noisy_mask(), DELTA, "-"),
        (worlds.raw_clip_weights(), DELTA, "-"),
        (worlds.truncated_noise(), 1e-7, "clean; 4.99"),
        (worlds.truncated_noise(spread=True), 1e-7, "-"),
    ]
    for subject, delta, reference in subjects:
        start = time.perf_counter()
        result = single_upload(subject, np.random.default_rng(0), delta=delta)
        seconds = time.perf_counter() - start
        counted = next(a.epsilon for a in reversed(result.tests) if "Clopper" in a.test)
        curve = next((f"{a.epsilon:.2f}" for a in result.tests if "Gaussian" in a.test), "-")
        verdict = "inf" if result.structure.leak else "clean"
        rows.append([subject.name, verdict, result.structure.deterministic, f"{counted:.2f}", curve, f"{seconds:.2f}", reference])
    show(
        "One upload, d = 1000, 1000 + 1000 tested, delta 1e-5 (truncated: 1e-7), one seed",
        ["mechanism", "structural", "constant coordinates", "CP", "GDP", "seconds", "ref"],
        rows,
    )


def two_world_bounds(
    mu: float, n: int, repeats: int, rng: np.random.Generator, pilot: int = 500
) -> tuple[list[float], list[float]]:
    through_mu, counted = [], []
    for _ in range(repeats):
        s0, s1 = rng.standard_normal(n), mu + rng.standard_normal(n)
        cut = choose_threshold(rng.standard_normal(pilot), mu + rng.standard_normal(pilot), n, DELTA, ALPHA)
        through_mu.append(gaussian.epsilon_of(rates(s0, s1, mu / 2).mu(ALPHA), DELTA))
        counted.append(rates(s0, s1, cut).epsilon(DELTA, ALPHA))
    return through_mu, counted


def two_worlds() -> None:
    reference = {
        1: (".15/.04", ".37/.12", ".72/.31", ".91/.54"),
        2: ("1.05/.34", "1.31/.49", "1.69/.81", "1.90/1.19"),
        4: ("2.87/1.06", "3.20/1.29", "3.64/1.80", "3.89/2.42"),
        8: ("6.57/2.31", "6.99/2.69", "7.54/3.47", "7.85/4.41"),
    }
    rng, rows = np.random.default_rng(0), []
    for epsilon, expected in reference.items():
        mu = gaussian.mu_of(epsilon, DELTA)
        for n, ref in zip((500, 1000, 5000, 50000), expected, strict=True):
            repeats = 100 if n <= 5000 else 20
            through_mu, counted = two_world_bounds(mu, n, repeats, rng)
            rows.append([epsilon, n, repeats, cell(through_mu), cell(counted), ref])
    show("Two worlds, n runs each, delta 1e-5", ["true eps", "n", "repeats", "GDP", "CP", "ref GDP/CP"], rows)


def power() -> None:
    rng, rows = np.random.default_rng(0), []
    for factor, ref in ((1.0, "-"), (0.8, "not refuted"), (0.7, "2.24"), (0.5, "3.57")):
        through_mu, counted = two_world_bounds(gaussian.mu_of(2.0, DELTA) / factor, 1000, 200, rng)
        rows.append([factor, cell(through_mu), f"{np.mean(np.array(through_mu) > 2):.0%}", cell(counted), ref])
    show("Power: claim eps 2, n = 1000 + 1000, 200 repeats", ["noise / claimed noise", "GDP", "refuted", "CP", "ref GDP"], rows)


def one_run() -> None:
    reference = {
        1: (".20+-.12 (150)", ".17", ".32+-.20", ".23", ".98"),
        2: (".70+-.22 (50)", ".59", "1.01+-.33", ".99", "1.98"),
        4: ("1.49+-.25 (50)", "1.34", "2.24+-.40", "2.90", "3.96"),
        8: ("2.92+-.35 (75)", "2.61", "4.69+-.57", "6.67", "7.98"),
    }
    rng, m, rows, head = (
        np.random.default_rng(0),
        1000,
        [],
        ["true eps", "Steinke (r)", "Bonferroni", "f-DP (r)", "two-world GDP 500 + 500", "mean fit"],
    )
    grid = symmetric_grid(m)
    level = ALPHA / len(grid)
    for epsilon, ref in reference.items():
        mu = gaussian.mu_of(epsilon, DELTA)
        plain, curve = (
            choose_guesses(lambda g, mu=mu: simulate_gaussian(m, mu, g), grid, bound, rng)  # type: ignore[misc]
            for bound in (lambda one: epsilon_bound(one, DELTA, ALPHA), lambda one: mu_bound(one, ALPHA))
        )
        columns: list[list[float]] = [[], [], [], [], []]
        for _ in range(100):
            scores, coins = simulate_gaussian(m, mu, rng)
            columns[0].append(epsilon_bound(guess(scores, coins, *plain), DELTA, ALPHA))
            columns[1].append(max(epsilon_bound(guess(scores, coins, *k), DELTA, level) for k in grid))
            columns[2].append(gaussian.epsilon_of(mu_bound(guess(scores, coins, *curve), ALPHA), DELTA))
            columns[3] += two_world_bounds(mu, 500, 1, rng)[0]
            columns[4].append(gaussian.epsilon_of(max(0.0, scores[coins].mean() - scores[~coins].mean()), DELTA))
        texts = [cell(values) for values in columns]
        texts[0] += f" ({sum(plain)})"
        texts[2] += f" ({sum(curve)})"
        rows += [[epsilon, *texts], ["ref", *ref]]
    show("One run, m = 1000 canaries, 100 runs, delta 1e-5; r guesses from a simulation of the claim", head, rows)
    rows = []
    for epsilon, expected in {1: ".45", 2: "1.07", 4: "2.21", 8: "3.71"}.items():
        mu = gaussian.mu_of(epsilon, DELTA)
        totals = (100, 200, 300, 500, 1000, 2000)
        k = choose_guesses(
            lambda g, mu=mu: simulate_gaussian(10_000, mu, g),
            symmetric_grid(10_000, totals),
            lambda one: epsilon_bound(one, DELTA, ALPHA),
            rng,
            runs=10,
        )  # type: ignore[misc]
        bounds = [epsilon_bound(guess(*simulate_gaussian(10_000, mu, rng), *k), DELTA, ALPHA) for _ in range(50)]
        rows.append([epsilon, f"{cell(bounds)} ({sum(k)})", expected])
    show("One run, m = 10 000, Steinke, 50 runs", ["true eps", "measured (r)", "ref"], rows)


def client_canaries() -> None:
    rng, rows = np.random.default_rng(0), []
    for k, d, repeats, fpr, ref in (
        (100, 5000, 100, 0.01, "unequal 6.7+-1.9; bound 1.2"),
        (1000, 50_000, 20, 0.001, "unequal 4.88+-.20; bound 2.43"),
    ):
        columns: list[list[float]] = [[], [], []]
        for _ in range(repeats):
            directions = canaries(k, d, rng)
            scores = final_scores(directions, directions.sum(axis=0) + rng.standard_normal(d))
            columns[0].append(estimate(scores, DELTA, d=d).epsilon)
            columns[1].append(estimate(scores, DELTA, d=d, equal_variance=False).epsilon)
            columns[2].append(threshold_bound(scores, d, DELTA, fpr=fpr).epsilon)
        rows.append([k, d, repeats, *map(cell, columns), ref])
    head = ["canaries", "d", "repeats", "estimate, equal variance", "unequal (published)", "fixed threshold", "ref"]
    show("Client canaries, one aggregate, true eps 4.38 (mu 1)", head, rows)


def linear_loss() -> None:
    rows = []
    for rounds, ref in ((1, "-"), (10, "1.27"), (50, "3.01"), (200, "5.68")):
        run = LinearRun(rounds)
        start = time.perf_counter()
        found = [audit_linear_loss(run, np.random.default_rng(seed)) for seed in range(10)]
        seconds = (time.perf_counter() - start) / 10
        mus, epsilons = [mu for mu, _ in found], [audit.epsilon for _, audit in found]
        claim = f"{run.claimed_mu:.3f} ({gaussian.epsilon_of(run.claimed_mu, DELTA):.2f})"
        rows.append([rounds, claim, f"{run.true_mu:.3f}", cell(mus), cell(epsilons), f"{seconds:.2f}", ref])
    head = ["T", "claimed mu (eps)", "exact mu", "audited mu", "audited eps", "seconds", "ref mu"]
    show("Noisy-FedAvg, Theorem 3 (a), linear losses, n = 5000 + 5000, 10 repeats, delta 1e-5", head, rows)


def soundness() -> None:
    repeats, rng, rows = 400, np.random.default_rng(0), []
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        mu = gaussian.mu_of(epsilon, DELTA)
        through_mu, counted = two_world_bounds(mu, 1000, repeats, rng)
        found: list[Guesses] = [guess(*simulate_gaussian(1000, mu, rng), 50, 50) for _ in range(repeats)]
        cells = [
            sum(bound > epsilon for bound in bounds) for bounds in (through_mu, counted, [epsilon_bound(g, DELTA) for g in found])
        ]
        rows.append([epsilon, *cells, sum(mu_bound(g) > mu for g in found)])
    show(
        f"Soundness: bounds above the truth in {repeats} repeats (20 allowed)",
        ["true eps", "GDP", "CP", "one run", "one run f-DP"],
        rows,
    )


def dp_sgd() -> None:
    rows = []
    cells = ((1000, 1, "zero_out"), (64, 1, "zero_out"), (16, 1, "zero_out"), (16, 1, "replace_one"), (64, 3, "zero_out"))
    for batch, steps, adjacency in cells:
        config = parse(
            {
                "data": {"partition": {"kind": "iid", "clients": 8}},
                "model": {"name": "linear"},
                "method": {"name": "dp-fedavg"},
                "training": {"rounds": 5, "batch_size": batch, "local_steps": steps, "local": "dp-sgd"},
                "privacy": {"delta": 1e-3, "epsilon": 2.0, "unit": "record", "adjacency": adjacency, "view": "server"},
            }
        )
        method, setting = calibrated_setting(config)
        for factor in (1.0, 0.5):
            noised = replace(setting, noise_multiplier=setting.z * factor)
            small, wide = (DpSgdClient(Case.of(method, noised, dimension=d), 5) for d in (60, 1000))
            worlds_ = audit_two_worlds(small, np.random.default_rng(0), n=300, delta=1e-3)
            canary = audit_canaries(wide, np.random.default_rng(0), delta=1e-3)
            test = worlds_.test.removeprefix("two worlds, ")
            rows.append(
                [f"{small.step.rate:.2f}", steps, adjacency, factor, f"{worlds_.epsilon:.2f} ({test})", f"{canary.epsilon:.2f}"]
            )
    show(
        "DP-SGD inside a client, 5 rounds, charged epsilon 2, n = 300 + 300, 650 canaries, delta 1e-3, one seed",
        ["rate", "steps a round", "adjacency", "noise / charged noise", "two worlds", "one run, canaries"],
        rows,
    )


def masks() -> None:
    config = parse(
        {
            "data": {"partition": {"kind": "iid", "clients": 8}},
            "model": {"name": "linear"},
            "method": {"name": "fedglp-adp", "variant": "published"},
            "training": {"rounds": 6, "clients_per_round": 4, "batch_size": 16, "batch_clip": 1.0, "local_steps": 2},
            "privacy": {"delta": 1e-3, "epsilon": 2.0, "view": "server"},
        }
    )
    case = Case.of(*calibrated_setting(config), dimension=200)
    trainer, rng, d = Trainer(case, pairs(case, 6)[0], 6, case.scope), np.random.default_rng(0), len(case.model)
    coupled = supports_given_releases(trainer, rng)
    free = [np.asarray(trainer(world, rng).sent).reshape(6, d) for world in (0, 1)]
    rows = [
        [t + 1, one.sent, one.differs, f"{one.gap:.0e}", int(np.sum(free[0][t] != free[1][t]))] for t, one in enumerate(coupled)
    ]
    show(
        "Masks of FedGLP-ADP (published) in two worlds",
        ["round", f"sent of {d}", "differ, coupled", "rounding", "differ, not coupled"],
        rows,
    )


def ceilings() -> None:
    expected = {100: "3.28", 500: "4.91", 1000: "5.60", 5000: "7.21", 50000: "9.51"}
    rows = [[n, f"{epsilon_ceiling(n):.2f}", f"{Rates(0, n, 0, n).epsilon(DELTA):.2f}", ref] for n, ref in expected.items()]
    show("Ceiling of n runs per world (alpha .05)", ["n", "delta 0", "delta 1e-5", "ref"], rows)
    show(
        "Ceiling of r right guesses",
        ["r", "measured", "ref"],
        [[r, f"{ceiling(r):.1f}", ref] for r, ref in ((50, 2.8), (100, 3.5), (200, 4.2), (1000, 5.8))],
    )


TABLES: dict[str, Callable[[], None]] = {
    "single_upload": single,
    "two_worlds": two_worlds,
    "power": power,
    "one_run": one_run,
    "client_canaries": client_canaries,
    "linear_loss": linear_loss,
    "dp_sgd": dp_sgd,
    "masks": masks,
    "soundness": soundness,
    "ceilings": ceilings,
}

if __name__ == "__main__":
    for name in arguments(__doc__, TABLES).names:
        TABLES[name]()
