"""One picture: Fashion-MNIST images, and what Inverting Gradients makes of each method's first upload of them.

    FEDVEIL_DATA=/path/to/data python benchmarks/reconstruction_strip.py            # attacks, writes results and picture
    FEDVEIL_DATA=/path/to/data python benchmarks/reconstruction_strip.py --draw     # draws the picture from the results again

One example per upload, first round, server view, target epsilon 8 at delta 1e-5 over 50 rounds of 10 of 20 clients;
published variants by their own formulas, proven ones calibrated. The attacker is adaptive: model, local step, clip, mask and
noise std are known.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.adversary.attack_options import AttackOptions
from fedveil.adversary.reconstruction import reconstruction
from fedveil.adversary.snapshot import snapshot_of
from fedveil.attacks.metrics import floors
from fedveil.configuration.config import Config, parse

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "reconstruction_strip.json"
FIGURE = HERE.parent / "docs" / "figures" / "reconstruction-strip.png"
OPTIONS = AttackOptions(images=5, steps=250, seed=3, settings={"tv": 1e-4})
RECORD = {"unit": "record", "adjacency": "replace_one"}
COLUMNS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("no defence\n(FedAvg)", {"name": "fedavg"}, {}),
    ("LaDP-FL\npublished", {"name": "ladp-fl", "variant": "published"}, RECORD),
    ("LaDP-FL\npublished\nR = 2", {"name": "ladp-fl", "variant": "published", "threshold": 2.0}, RECORD),
    ("LaDP-FL\nproven", {"name": "ladp-fl"}, {}),
    ("FedGLP-ADP\npublished", {"name": "fedglp-adp", "variant": "published"}, {}),
    ("FedGLP-ADP\nproven", {"name": "fedglp-adp"}, {}),
    ("FedANC\npublished", {"name": "fedanc", "variant": "published"}, RECORD),
    ("FedANC\nproven", {"name": "fedanc", "pace": 1.5}, {}),
    ("ALDP-FL\npublished", {"name": "aldp-fl", "variant": "published"}, RECORD),
    ("ALDP-FL\nproven", {"name": "aldp-fl"}, {}),
    ("Noisy-FedAvg\nproven", {"name": "noisy-fedavg"}, {}),
    ("Noisy-FedProx\nproven", {"name": "noisy-fedprox"}, {}),
    ("DP-FedAvg\nproven", {"name": "dp-fedavg"}, {}),
]


def configuration(method: dict[str, Any], privacy: dict[str, Any]) -> Config:
    """The common setting of all columns."""
    target = {} if method["name"] == "fedavg" else {"epsilon": 8.0}
    return parse(
        {
            "data": {
                "name": "fashion-mnist",
                "data_dir": os.environ.get("FEDVEIL_DATA"),
                "partition": {"kind": "iid", "clients": 20},
            },
            "model": {"name": "mlp", "hidden": [100]},
            "method": method,
            "training": {
                "rounds": 50,
                "clients_per_round": 10,
                "sampling": "fixed",
                "local_steps": 1,
                "batch_clip": 1.0,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
            "privacy": {"view": "server", "delta": 1e-5, **target, **privacy},
            "run": {"engine": "inline"},
        }
    )


def measure(chosen: str) -> dict[str, Any]:
    """Attack the columns whose name holds `chosen`, the others stay; images as bytes, so that the results hold the picture."""
    before = json.loads(RESULTS.read_text()) if chosen else {}
    found: dict[str, Any] = {"settings": __doc__.split("\n\n")[-1].strip(), "columns": []}
    for label, method, privacy in COLUMNS:
        kept = next((c for c in before.get("columns", []) if c["label"] == label and chosen not in label), None)
        if kept is not None:
            found["columns"].append(kept)
            continue
        snapshot = snapshot_of(configuration(method, privacy), seed=OPTIONS.seed)
        outcome = reconstruction("ig", snapshot, OPTIONS, lambda done, total, what: None)
        assert outcome.originals is not None
        if "originals" not in found:
            reference = snapshot.bounds.images(snapshot.federation.test[0][:1000])
            found |= {"originals": _bytes(outcome.originals), "floors": _floors(reference, outcome.originals)}
        assert found["originals"] == _bytes(outcome.originals), "every column must attack the same images"
        ratios, images = outcome.record["noise_ratio"], outcome.rows[0][1]
        column = {
            "label": label,
            "method": method,
            "privacy": privacy,
            "psnr": outcome.record["each"]["psnr"],
            "noise_ratio": float(np.median(ratios)),
            "notes": [line for line in outcome.assumptions if "not simulated" in line or "not count" in line],
            "images": _bytes(images),
        }
        found["columns"].append(column)
        print(
            f"{label!r:34} PSNR {np.median(column['psnr']):5.1f} dB  r {column['noise_ratio']:.3g}  {column['notes']}", flush=True
        )
    return found


def _floors(reference: Tensor, truth: Tensor) -> dict[str, float]:
    return {name: float(np.median(s.psnr)) for name, s in floors(truth, reference, OPTIONS.seed).items()}


def _bytes(images: Tensor) -> list[list[list[int]]]:
    return (images[:, 0] * 255).round().int().tolist()  # type: ignore[no-any-return]


def draw(found: dict[str, Any], path: Path) -> None:
    """A column per method, a row per image, the PSNR under each reconstruction."""
    from matplotlib.figure import Figure

    columns, originals = found["columns"], np.array(found["originals"]) / 255
    n, width = len(originals), len(columns) + 1
    figure = Figure(figsize=(0.98 * width + 0.2, 1.12 * n + 1.5), layout="constrained")
    axes = figure.subplots(n, width, squeeze=False)
    for i in range(n):
        shown = [originals[i], *[np.array(c["images"][i]) / 255 for c in columns]]
        notes = ["", *[f"{c['psnr'][i]:.1f} dB" for c in columns]]
        for axis, image, note in zip(axes[i], shown, notes, strict=True):
            axis.imshow(image, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(note, fontsize=8, color="#0b6e4f" if note and float(note.split()[0]) >= 20 else "#444444", labelpad=2)
    for axis, label in zip(axes[0], ["original", *[c["label"] for c in columns]], strict=True):
        axis.set_title(label, fontsize=8.5)
    for axis, ratio in zip(axes[-1], [None, *[c["noise_ratio"] for c in columns]], strict=True):
        if ratio is not None:
            axis.set_xlabel(f"{axis.get_xlabel()}\nr = {ratio:,.{0 if ratio >= 10 else 2}f}", fontsize=8, labelpad=2)
    mean, other = found["floors"]["mean image"], found["floors"]["other image"]
    figure.supxlabel(
        "Inverting Gradients on one upload of one example, first round, server view, network mlp 784-100-10; target epsilon 8, "
        "delta 1e-5, 50 rounds of 10 of 20 clients.\nThe attacker knows model, local step, clip, mask and noise std. "
        f"PSNR under each (from 20 dB in green); floors: mean image {mean:.1f} dB, another image {other:.1f} dB. "
        "r = |noise| / |update without noise|, median.",
        fontsize=8,
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure unless told to draw only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw from the stored results")
    torch.set_num_threads(1)
    parser.add_argument("--columns", default="", help="measure columns whose name holds this text; the others stay")
    options = parser.parse_args()
    if not options.draw:
        RESULTS.write_text(json.dumps(measure(options.columns)) + "\n")
    draw(json.loads(RESULTS.read_text()), FIGURE)
    print(FIGURE)


if __name__ == "__main__":
    main()
