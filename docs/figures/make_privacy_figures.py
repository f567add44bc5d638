"""Draw the figures of docs/privacy.md as SVG files next to this script: python docs/figures/make_privacy_figures.py [folder]."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from fedveil.accounting import last_iterate
from fedveil.accounting.accountant import calibrate
from fedveil.accounting.gaussian import classical_noise_multiplier, mu_of, tpr
from fedveil.accounting.last_iterate import final_mu_constant
from fedveil.accounting.types import Adjacency, SampledGaussian, View
from fedveil.papers.convergent_dp import claim as noisy_fedavg
from fedveil.papers.convergent_dp.claim import StepRates

RED, BLUE, GREEN, GREY = "#b3261e", "#1f5fa8", "#2e7d4f", "#6b6b6b"
STYLE = {
    "svg.hashsalt": "fedveil",
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 2,
    "legend.frameon": False,
    "figure.figsize": (6.4, 4.0),
}


def claimed_against_proven(axes: Axes) -> None:
    """Noisy-FedAvg, constant rates: the printed theorem, the exact value of linear losses, and what is proven."""
    rate, clip, steps, clients, sigma, smooth, diameter = 0.01, 1.0, 5, 50, 0.05, 0.1, 0.5
    gamma = last_iterate.shift([rate] * steps, clip, clients)
    rho, std = last_iterate.lipschitz([rate] * steps, smooth), sigma / math.sqrt(clients)
    rounds = np.unique(np.geomspace(1, 20_000, 160).astype(int))
    run = {"learning_rate": rate, "clip": clip, "steps": steps, "smoothness": smooth, "clients": clients, "noise_std": sigma}
    claimed = [noisy_fedavg.FedAvgClaim(StepRates.CONSTANT, rounds=int(t), **run).mu for t in rounds]
    linear = [noisy_fedavg.linear_loss_mu([gamma] * int(t), clients, sigma) for t in rounds]
    server = [noisy_fedavg.composition_mu([gamma] * int(t), clients, sigma, View.SERVER) for t in rounds]
    last = [final_mu_constant(rho, gamma, int(t), diameter, std) for t in rounds]
    axes.loglog(rounds, server, color=GREY, linestyle=":", label="proven, server view (each upload)")
    axes.loglog(rounds, linear, color=RED, label="attained by linear losses, no projection\n= proven, aggregate view")
    axes.loglog(rounds, last, color=GREEN, label=f"proven, last model only, projected (D = {diameter:g})")
    axes.loglog(rounds, claimed, color=BLUE, linestyle="--", label="claimed, Theorem 3 (a), no projection")
    axes.set(xlabel="rounds T", ylabel="mu (Gaussian DP)", title="Noisy-FedAvg, constant learning rate")
    axes.legend(fontsize=8, loc="upper left")


def trade_off(axes: Axes) -> None:
    """The best true-positive rate of any attack on a mu-GDP run."""
    fpr = np.linspace(0, 1, 401)
    for mu, colour in ((0.25, GREEN), (0.5, BLUE), (1.0, GREY), (2.0, RED)):
        axes.plot(fpr, [tpr(mu, float(x)) for x in fpr], color=colour, label=f"mu = {mu:g}")
    axes.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle=":", label="guessing")
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate", xlim=(0, 1), ylim=(0, 1))
    axes.set_title("The best attack that a mu-GDP release allows")
    axes.legend(loc="lower right")


def noise_against_epsilon(axes: Axes) -> None:
    """Noise multiplier of one release and of 60 sampled rounds; the textbook formula beside the exact one."""
    epsilons, delta = np.geomspace(0.1, 20, 40), 1e-5

    def sampled(rate: float) -> list[float]:
        return [
            calibrate(float(e), delta, lambda z: [SampledGaussian(rate, z, 60)], adjacency=Adjacency.ZERO_OUT) for e in epsilons
        ]

    axes.loglog(
        epsilons, [math.sqrt(60) / mu_of(float(e), delta) for e in epsilons], color=RED, label="60 rounds, everybody (exact)"
    )
    axes.loglog(epsilons, sampled(0.1), color=GREEN, label="60 rounds, Poisson rate 0.1")
    axes.loglog(epsilons, [1 / mu_of(float(e), delta) for e in epsilons], color=BLUE, label="one release (exact)")
    textbook = [classical_noise_multiplier(float(e), delta) for e in epsilons]
    axes.loglog(epsilons, textbook, color=BLUE, linestyle="--", label="one release, textbook (proven for epsilon < 1)")
    axes.set(xlabel="epsilon at delta = 1e-5 (zero-out)", ylabel="noise std / clip", title="Noise that an epsilon needs")
    axes.legend(fontsize=8)


FIGURES: dict[str, Callable[[Axes], None]] = {
    "claimed_against_proven": claimed_against_proven,
    "trade_off": trade_off,
    "noise_against_epsilon": noise_against_epsilon,
}


def main(folder: Path, suffix: str = "svg") -> None:
    """Draw every figure into `folder`."""
    mpl.use("Agg")
    with mpl.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure, axes = plt.subplots(layout="constrained")
            draw(axes)
            figure.savefig(folder / f"{name}.{suffix}", metadata={"Date": None} if suffix == "svg" else None, dpi=110)
            plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent, sys.argv[2] if len(sys.argv) > 2 else "svg")
