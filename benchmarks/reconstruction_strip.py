"""One strip and one table: what a reconstruction attack makes of each method's first upload of the same images.

    FEDVEIL_DATA=/path/to/data python benchmarks/reconstruction_strip.py            # attacks what is not in the results yet
    FEDVEIL_DATA=/path/to/data python benchmarks/reconstruction_strip.py --again "" # attacks everything again
    python benchmarks/reconstruction_strip.py --draw                                # tables and picture from the results

Columns are all registered methods in all variants, with the options and the promise of their preset (on Fashion-MNIST where there
is one; without one the method's defaults at epsilon 8 and delta 1e-5). One example per upload, first round, server view, one
local step, 50 rounds of 10 of 20 clients. Inverting Gradients, once by an attacker who knows nothing but the model and the local
step, once by one who also knows mask, clip, noise and 500 public images. `bypasses` attacks Soteria and CENSOR in ways of their
own. What is not attacked with as many images as asked for is attacked again, so a run that was broken off goes on. The tables go
into docs/attacks.md.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.attacks.attack_options import PUBLIC, AttackOptions
from fedveil.attacks.attack_table import configured
from fedveil.attacks.snapshot import snapshot_of
from fedveil.errors import ConfigError
from fedveil.experiment.assembly import Prepared, prepare
from fedveil.experiment.config import Config, parse
from fedveil.experiment.presets import names, path_of
from fedveil.experiment.resolve import data_spec, opened
from fedveil.experiment.run_directory import plain
from fedveil.methods.method_registry import METHODS
from harness import FIGURES, arguments, keep, kept, markdown, mean_and_spread, put

COMMAND = "python benchmarks/reconstruction_strip.py"
DRAWN = 5
"""Images drawn, and kept in the results."""
NETWORKS: dict[str, tuple[dict[str, Any], int]] = {
    "LeNet-5": ({"name": "lenet5", "activation": "sigmoid", "pool": "avg"}, 200),
    "CNN": ({"name": "cnn2"}, 200),
}
"""LeNet-5 as in 1998, and the CNN of FedGLP-ADP (two convolutions, two fully connected layers); steps of the attack."""
STRIP = "LeNet-5"
"""The network whose reconstructions are drawn."""
HOPELESS = 1000
"""r from which all attacks end at the same pictures, so that they are not drawn."""
PROMISE = ("epsilon", "delta", "unit", "adjacency")
KNOWS = {"informed": PUBLIC, "naive": ()}
OWN: dict[str, dict[str, Any]] = {
    "adap-dp-fl": {"training": {"local": "dp-sgd", "example_clip": 1.0, "batch_size": 3000}, "privacy": {"unit": "record"}},
    "banded-mf": {"method": {"separation": 2}, "privacy": {"view": "aggregate"}},
}
"""What methods need that adapt DP-SGD inside the clients (all examples in each step), or let out sums only."""
Column = tuple[str, dict[str, Any], dict[str, Any]]


def columns() -> Iterator[Column]:
    """Label, method and privacy of each: no defence first, then what is registered."""
    yield "no defence", {"name": "fedavg"}, {}
    for name, kind in METHODS.items():
        variants = ("published", "proven") if "variant" in kind.model_fields else ("",)
        for variant in variants if name != "fedavg" else ():
            method, privacy = from_preset(name, variant)
            yield f"{name}\n{variant}".strip(), method, privacy


def from_preset(name: str, variant: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections of the method's preset of that variant; without one its defaults at epsilon 8."""
    raws = [tomllib.loads(path_of(preset).read_text()) for preset in names(name)]
    fitting = [raw for raw in raws if not variant or raw["method"].get("variant", "proven") == variant]
    fitting.sort(key=lambda raw: raw["data"]["name"] != "fashion-mnist")
    if fitting:
        privacy = fitting[0].get("privacy", {})
        return fitting[0]["method"], {key: privacy[key] for key in PROMISE if key in privacy}
    return {"name": name, **({"variant": variant} if variant else {})}, {"epsilon": 8.0, "delta": 1e-5}


def configuration(network: str, method: dict[str, Any], privacy: dict[str, Any]) -> Config:
    """The common setting of all columns, with what `OWN` says of the method."""
    own = OWN.get(method["name"], {})
    training = {"rounds": 50, "clients_per_round": 10, "sampling": "fixed", "local_steps": 1, "batch_size": 1, "batch_clip": 1.0}
    return parse(
        {
            "data": {
                "name": "fashion-mnist",
                "data_dir": os.environ.get("FEDVEIL_DATA"),
                "partition": {"kind": "iid", "clients": 20},
            },
            "model": NETWORKS[network][0],
            "method": {**method, **own.get("method", {})},
            "training": {**training, "optimizer": {"name": "sgd", "lr": 0.1}, **own.get("training", {})},
            "privacy": {**privacy, "view": "server", "allow_vacuous_delta": True, **own.get("privacy", {})},
            "run": {"engine": "inline"},
        }
    )


def bypasses() -> Iterator[tuple[str, dict[str, Any], str, dict[str, Any]]]:
    """Label, method, attack and options: what gets around Soteria and CENSOR, and what does not."""
    known = (*PUBLIC, "labels")
    aligned = {"tv": 1e-4, "aligned": True}
    for form in ("repo", "paper"):
        yield f"soteria, {form}: its columns left out", {"name": "soteria", "form": form}, "ig", {}
        yield f"censor, {form}: norms and orthogonality", {"name": "censor", "form": form}, "subspace", {"knows": known}
    yield "censor, repo: direction up to its sign", {"name": "censor"}, "subspace", {"knows": known, "settings": aligned}
    yield "censor, repo: in round 10, after the defence ended", {"name": "censor"}, "ig", {"round": 10}


def attacked(network: str, method: dict[str, Any], privacy: dict[str, Any], kind: str, options: AttackOptions) -> dict[str, Any]:
    """Scores of one attack, and its images as bytes, or why there is none."""
    try:
        snapshot = snapshot_of(
            *opened(configuration(network, method, privacy)), seed=options.seed, round=options.round, prepared=data()
        )
        outcome = configured(kind, options).on(snapshot, options, lambda done, total, what: None)
    except ConfigError as problem:
        return {"refused": str(problem)}
    assert outcome.originals is not None
    record = outcome.record
    each = {name: record["each"][name] for name in ("psnr", "ssim", "mse")}
    floors = {name: summary["psnr_median"] for name, summary in record["floors"].items()}
    ratio = float(np.median([r for r in record["noise_ratio"] if r is not None] or [np.nan]))
    images = [_bytes(outcome.originals), _bytes(outcome.rows[0][1])]
    return {**each, "labels": record["labels_right"], "noise_ratio": ratio, "floors": floors, "images": images}


def _bytes(images: Tensor) -> list[list[list[int]]]:
    return (images[:, 0] * 255).round().int().tolist()  # type: ignore[no-any-return]


def jobs() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any], str, dict[str, Any]]]:
    """Name, network, method, privacy, attack and options of every attack: first by those who know the defence."""
    for who, knows in KNOWS.items():
        for network in NETWORKS:
            for label, method, privacy in columns():
                more = ("others",) if OWN.get(method["name"], {}).get("privacy", {}).get("view") == "aggregate" else ()
                yield f"{network}/{label}/{who}", network, method, privacy, "ig", {"knows": (*knows, *more)}
        for label, method, kind, own in bypasses() if who == "informed" else ():
            yield f"LeNet-5/{label}/bypass", "LeNet-5", method, {}, kind, own


@cache
def data() -> Prepared:
    """The data, which are the same for all."""
    return prepare(data_spec(configuration(STRIP, {"name": "fedavg"}, {})))


def measure(count: int, again: str | None, only: str) -> None:
    """Attack what the results lack with so many images, or what has `again` in its name; each attack is written when done."""
    found: dict[str, Any] = kept("reconstruction_strip")
    for key, network, method, privacy, kind, own in jobs():
        done = len(found.get(key, {}).get("psnr", [])) >= count and (again is None or again not in key)
        if done or not re.search(only, key, re.DOTALL):
            continue
        options = AttackOptions(images=count, seed=3, steps=NETWORKS[network][1], **{"settings": {"tv": 1e-4}, **own})
        one = attacked(network, method, privacy, kind, options)
        if "give Knowledge.labels" in one.get("refused", ""):
            known = (*own.get("knows", PUBLIC), "labels")
            one = attacked(network, method, privacy, kind, replace(options, knows=known)) | {"labels": None}
        if "labels" in own.get("knows", ()) and "labels" in one:
            one |= {"labels": None}
        originals, made = one.pop("images", (None, None))
        if originals and key.startswith(STRIP) and key.endswith("/informed"):  # the others are not drawn
            one |= {"images": made[:DRAWN], **({"originals": originals[:DRAWN]} if method["name"] == "fedavg" else {})}
        found[key] = one | {"method": method, "privacy": privacy, "attack": kind}
        keep("reconstruction_strip", plain({name: found[name] for name, *_ in jobs() if name in found}), indent=None)
        print(key.replace("\n", " "), cells(found[key]), flush=True)


def cells(one: dict[str, Any]) -> list[str]:
    """Mean PSNR, its largest, SSIM, MSE, labels, r."""
    if "refused" in one:
        return [one["refused"], *[""] * 5]
    labels = "known" if one["labels"] is None else f"{one['labels']:.0%}"
    r = float(one["noise_ratio"])
    ratio = f"{r:.3g}" if r < HOPELESS else f"{r:,.0f}"
    return [
        mean_and_spread(one["psnr"]),
        f"{max(one['psnr']):.1f}",
        mean_and_spread(one["ssim"], 3),
        mean_and_spread(one["mse"], 3),
        labels,
        ratio,
    ]


def tables(found: dict[str, Any]) -> str:
    """A table of each network: all methods, by attackers who know nothing of the defence and who know it; and the bypasses."""
    parts = []
    for network in NETWORKS:
        informed = {key: one for key, one in found.items() if key.startswith(f"{network}/") and key.endswith("/informed")}
        if not informed:
            continue
        floors = next(iter(informed.values()))["floors"]
        parts.append(
            f"**{network}**. Floors, of the first row's images: mean image {floors['mean image']:.1f} dB, another image "
            f"{floors['other image']:.1f} dB, uniform noise {floors['uniform']:.1f} dB.\n"
        )
        rows = []
        for key, one in informed.items():
            naive = found.get(key.replace("/informed", "/naive"), {})
            before = mean_and_spread(naive["psnr"]) if "psnr" in naive else ""
            if before and len(naive["psnr"]) < len(one.get("psnr", [])):
                before += f" ({len(naive['psnr'])})"
            epsilon = f"{one['privacy']['epsilon']:g}" if "epsilon" in one["privacy"] else "-"
            n = len(one["psnr"]) if "psnr" in one else ""
            rows.append([key.split("/")[1].replace("\n", ", "), epsilon, n, before, *cells(one)])
        head = ["method", "epsilon", "n", "naive", "informed", "largest", "SSIM", "MSE", "labels", "r"]
        parts += [markdown(head, rows), ""]
    bypassed = {key.split("/")[1]: one for key, one in found.items() if key.endswith("/bypass")}
    rows = [[name, len(one.get("psnr", [])), *cells(one)[:5]] for name, one in bypassed.items()]
    parts += ["**What gets around Soteria and CENSOR**, LeNet-5:\n"]
    parts += [markdown(["attack", "n", "PSNR", "largest", "SSIM", "MSE", "labels"], rows)]
    return "\n".join(parts)


def draw(found: dict[str, Any], path: Path) -> None:
    """A column per method, attacked by the informed attacker; a row per image, with its PSNR."""
    from matplotlib.figure import Figure

    shown = {key.split("/")[1]: one for key, one in found.items() if "images" in one and float(one["noise_ratio"]) < HOPELESS}
    first = next(iter(shown.values()))
    n = min(len(one["images"]) for one in shown.values())
    figure = Figure(figsize=(0.98 * (len(shown) + 1) + 0.2, 1.15 * n + 1.5), layout="constrained")
    axes = figure.subplots(n, len(shown) + 1, squeeze=False)
    for i, line in enumerate(axes):
        cells = [(first["originals"][i], None), *((one["images"][i], one["psnr"][i]) for one in shown.values())]
        for axis, (image, psnr) in zip(line, cells, strict=True):
            axis.imshow(np.array(image) / 255, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            if psnr is not None:
                axis.set_xlabel(f"{psnr:.1f} dB", fontsize=8, color="#0b6e4f" if psnr >= 15 else "#444444", labelpad=2)
    for axis, label in zip(axes[0], ["original", *shown], strict=True):
        axis.set_title(label.replace("-", "-\n", 1) if len(label.split("\n")[0]) > 12 else label, fontsize=8)
    for axis, one in zip(axes[-1][1:], shown.values(), strict=True):
        r = one["noise_ratio"]
        axis.set_xlabel(f"{axis.get_xlabel()}\nr = {r:,.{0 if r >= 10 else 2}f}", fontsize=8, labelpad=2)
    figure.supxlabel(
        f"Inverting Gradients, {NETWORKS[STRIP][1]} steps, on one upload of one example, first round, server view, {STRIP}. "
        "Options and epsilon are those of each method's preset, or epsilon 8.\nThe attacker knows model, local step, clip, mask "
        f"and noise std. PSNR from 15 dB in green; floors: mean image {first['floors']['mean image']:.1f} dB, another image "
        f"{first['floors']['other image']:.1f} dB. r = |noise| / |update without noise|, median; methods at {HOPELESS:,} or "
        "more are in the table only.",
        fontsize=8,
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    asked = arguments(__doc__, draw=False, images=8, again=str, only="")
    torch.set_num_threads(1)
    if not asked.draw:
        measure(asked.images, asked.again, asked.only)
    found = kept("reconstruction_strip")
    put("attacks.md", f"<!-- tables: {COMMAND} -->", tables(found), "<!-- end of tables -->")
    draw(found, FIGURES / "reconstruction-strip.png")
