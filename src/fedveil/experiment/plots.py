"""Pictures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedveil.federation.fit import Record

INK, MUTED, BLUE, ORANGE, GREEN = "#222222", "#777777", "#0072B2", "#D55E00", "#009E73"


def plot_curves(history: Sequence[Record], path: Path) -> Path:
    """Accuracy, loss, and the noise of the mean update against its own norm, over rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    scored = [r for r in history if "test_accuracy" in r]
    rounds = [r["round"] + 1 for r in scored]
    left.plot(rounds, [100 * r["test_accuracy"] for r in scored], color=BLUE)
    left.set(title="test accuracy (%)", xlabel="round", ylim=(0, 100))
    middle.plot(rounds, [r["test_loss"] for r in scored], color=ORANGE)
    middle.set(title="test loss", xlabel="round")
    released = [r for r in history if "update_norm" in r]
    at = [r["round"] + 1 for r in released]
    right.plot(at, [r["update_norm"] for r in released], color=BLUE, label="released mean update")
    right.plot(at, [r["noise_norm"] for r in released], color=GREEN, linestyle="--", label="expected norm of its noise")
    right.set(title="update and noise (L2 norm)", xlabel="round", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    return path
