"""Measurements by name for a row's configuration. Most read a finished run; some need no training.

Attacks are those of `fedveil attack`, on the same states of a run. The attackers are naive: they know how a client trains, but
neither labels, noise nor masks; the option `knows` of an inversion gives it more knowledge.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.attacks.attack_options import AttackOptions
from fedveil.attacks.attack_run import attacked
from fedveil.attacks.attack_table import ATTACKS
from fedveil.attacks.labels import from_outputs
from fedveil.attacks.metrics import save_comparison
from fedveil.attacks.reconstruction import GradientMatching
from fedveil.attacks.snapshot import snapshot_of
from fedveil.errors import ConfigError, nearest
from fedveil.experiment.assembly import prepare
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config
from fedveil.experiment.public_setting import setting_of
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.resolve import data_spec, opened
from fedveil.experiment.run_directory import write_text
from fedveil.federation.history import Row
from fedveil.registry import Registry
from fedveil.studies.reproduce.recipe import Measured
from fedveil.studies.twin import Change, twin_runs


@dataclass(frozen=True)
class Measure:
    """A measurement.

    trains: whether it needs the row's run. series: function of the configuration, the run's directory (None without a run), a
    folder for files, and its options.
    """

    summary: str
    trains: bool
    series: Callable[..., Measured]

    def checked(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options without `name`. Raises ConfigError for an unknown option."""
        chosen = {key: value for key, value in options.items() if key != "name"}
        allowed = list(inspect.signature(self.series).parameters)[3:]
        for key in chosen:
            if key not in allowed:
                raise ConfigError(f"measure.{key}: unknown{nearest(key, allowed)}; it takes {', '.join(allowed) or 'nothing'}")
        return chosen


def of_run(config: Config, run: Path | None, folder: Path) -> Measured:
    """Return the columns of the history, and the mean of the clients' accuracies of the global model."""
    assert run is not None
    data = read_run(run)
    found: dict[str, list[tuple[int, float]]] = {name: _points(data.history, name) for name in data.columns}
    found["client_accuracy"] = _means(data.clients)
    return found


def _of_statement(config: Config, run: Path | None, folder: Path) -> Measured:
    """Return the claimed epsilon, and the proven epsilon in the view of the configuration."""
    found = {}
    for view in certify_config(config).views:
        if view.view is config.privacy.view:
            found["proven_epsilon"] = [(1, view.proven.epsilon)]
        if view.claimed is not None:
            found["claimed_epsilon"] = [(1, view.claimed.epsilon)]
    return found


def _of_uplink(config: Config, run: Path | None, folder: Path) -> Measured:
    """Return the share of saved upload bits in a run, compared with 32 bits per coordinate and round."""
    assert run is not None
    data, parameters = read_run(run), setting_of(config).layout.dimension
    bits = [float(row["uplink_bits"]) for row in data.history if isinstance(row.get("uplink_bits"), float)]
    return _figures({"saved": 1 - sum(bits) / (32 * parameters * len(bits))}) if bits else {}


def of_twins(config: Config, run: Path | None, folder: Path, *, client: int = 0, change: Change = "record") -> Measured:
    """Return ||w_t - w'_t|| after each round of two runs that differ in one client's data, and the last accuracy of the first."""
    distances, history = twin_runs(config, client, change)
    scored = [(int(row["round"]) + 1, float(row["test_accuracy"])) for row in history if "test_accuracy" in row]
    return {"sensitivity": list(enumerate(distances, 1)), "test_accuracy": scored}


def _of_partition(config: Config, run: Path | None, folder: Path, *, curious: int = 0) -> Measured:
    """Return the numbers of labels and examples of the curious client and of the others."""
    prepared = prepare(data_spec(config))
    counts = prepared.partition.label_counts(prepared.dataset.y_train, prepared.dataset.info.strata)
    others = np.delete(counts, curious, 0)
    figures = {
        "labels_curious": (counts[curious] > 0).sum(),
        "labels_others": np.median((others > 0).sum(1)),
        "examples_curious": counts[curious].sum(),
        "examples_least": others.sum(1).min(),
        "examples_most": others.sum(1).max(),
    }
    return _figures(figures)


def _of_inversion(
    config: Config,
    run: Path | None,
    folder: Path,
    *,
    attack: str = "ig",
    images: int = 10,
    settings: dict[str, Any] | None = None,
    knows: Sequence[str] = (),
) -> Measured:
    """Return mean scores of reconstructions of the first test images, each from one upload after one step on a copy of it.

    Args:
        folder: gets reconstruction.png, originals above reconstructions. settings: of the attack (`fedveil.attacks.attack_run`).
        knows: additional knowledge of the attacker (see `fedveil attack --knows`); by default none, as in the papers.
    """
    if not issubclass(ATTACKS.find(attack, "measure.attack"), GradientMatching):
        raise ConfigError(f"measure.attack = {attack!r}: this attack reconstructs no images")
    options = AttackOptions(images=images, knows=tuple(knows), examples="test", settings=settings or {})
    snapshot, outcome = attacked(attack, options, *opened(config), run, last=run is not None)
    if outcome.originals is not None:
        folder.mkdir(parents=True, exist_ok=True)
        ((_, made),) = outcome.rows
        save_comparison(folder / "reconstruction.png", outcome.originals, [(f"{attack}, {config.method.name}", made)])
    scores, size = outcome.record["each"], math.prod(snapshot.info.input_shape)
    found = {name: scores[name] for name in ("mse", "mae", "psnr", "ssim") if scores[name] is not None}
    return _figures({**{k: np.mean(v) for k, v in found.items()}, "l2": np.mean(np.sqrt(np.array(scores["mse"]) * size))})


def _of_labels(config: Config, run: Path | None, folder: Path, *, images: int = 1000) -> Measured:
    """Return the share of test images whose label is the model's output: rule "output", which depends on the accuracy."""
    snapshot = snapshot_of(*opened(config), run, last=True)
    x, y = snapshot.federation.test
    found = from_outputs(x[:images], y[:images], *snapshot.model)
    return _figures({"accuracy": found.accuracy, "constant_guess": found.constant_guess})


def _of_attribute(config: Config, run: Path | None, folder: Path, *, known: int = 2000, images: int = 1000) -> Measured:
    """Infer whether an image shows an animal (CIFAR-10) by a probe on the model's features, fitted on `known` other images."""
    if config.data.name != "cifar10":
        raise ConfigError(f"the attribute 'animal or not' is that of cifar10, not of {config.data.name}")
    options = AttackOptions(images=images, examples="test", settings={"auxiliary": known})
    return _recorded("attribute", options, config, run, "accuracy", "balanced_accuracy", "auc")


def _of_extraction(config: Config, run: Path | None, folder: Path, *, queries: int = 5000, epochs: int = 50) -> Measured:
    """Train a fresh network on the model's outputs for the first test images, and score it on others."""
    options = AttackOptions(images=queries, seed=config.run.seed, settings={"epochs": epochs, "student": 1})
    own = {"victim": "victim_accuracy", "student": "student_accuracy", "agreement": "agreement"}
    return _recorded("extraction", options, config, run, **own)


def _of_clients(config: Config, run: Path | None, folder: Path, *, targets: int = 10, probes: int = 10) -> Measured:
    """Return the share of targets whose upload is identified among those of all clients, by the gradient on probe images.

    Args:
        targets: number of target clients, the first ones. probes: images of each that the attacker has.
    """
    options = AttackOptions(knows=(), examples="all", settings={"targets": targets, "probes": probes})
    return _recorded("identification", options, config, run, "matched", "top", "tpr", chance="chance_matched")


def _of_generated(
    config: Config,
    run: Path | None,
    folder: Path,
    *,
    settings: dict[str, Any],
    images: int = 10_000,
    steps: int = 200,
    batch: int = 64,
) -> Measured:
    """Return Frechet distances of images that a curious client generates of the private class and of its own classes.

    The features are those of a judge trained on public data, so this is not FID. `floor_...` is the distance of two halves of
    the real images, for the same number of images.

    Args:
        folder: gets generated.png and attack.json, the record of the attack with the digest of the judge.
        settings: of the attack, such as `private` and `controls`. images: number of generated images of each class.
        steps, batch: of the generator, per round.
    """
    options = AttackOptions(images=images, steps=steps, batch=batch, settings=settings)
    outcome = attacked("gan", options, *opened(config))[1]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "attack.json", json.dumps(outcome.record, indent=1))
    if outcome.originals is not None:
        save_comparison(folder / "generated.png", outcome.originals, outcome.rows, config.method.name, paired=False)
    record = outcome.record
    classes = {"private": record["private"], **{f"public_{i}": scores for i, scores in enumerate(record["owned"], 1)}}
    found = {name: record[name] for name in ("accuracy", "judge_accuracy")}
    for name, scores in classes.items():
        found |= {f"distance_{name}": scores["distance"], f"floor_{name}": scores["same_source"]}
        found |= {f"other_{name}": scores["other_class"], f"rate_{name}": scores["class_rate"], f"n_{name}": scores["n"]}
    return _figures(found)


def _recorded(kind: str, options: AttackOptions, config: Config, run: Path | None, *own: str, **more: str) -> Measured:
    """Return figures from the record of an attack on the last model, optionally under other names."""
    record = attacked(kind, options, *opened(config), run, last=True)[1].record
    return _figures({name: record[key] for name, key in ({one: one for one in own} | more).items()})


def _figures(values: Mapping[str, float]) -> Measured:
    """Return series for figures that belong to no round."""
    return {name: [(1, float(value))] for name, value in values.items()}


def _points(rows: list[Row], column: str) -> list[tuple[int, float]]:
    return [(int(row["round"]) + 1, float(row[column])) for row in rows if isinstance(row.get(column), float)]


def _means(clients: list[Row]) -> list[tuple[int, float]]:
    by_round: dict[int, list[float]] = {}
    for row in clients:
        if isinstance(row.get("accuracy"), float):
            by_round.setdefault(int(row["round"]) + 1, []).append(row["accuracy"])
    return [(t, sum(values) / len(values)) for t, values in sorted(by_round.items())]


_GENERAL = {
    "run": Measure("train, and read the history", True, of_run),
    "uplink": Measure("train, and add up what the clients sent", True, _of_uplink),
    "statement": Measure("certify", False, _of_statement),
    "twin": Measure("train twice on data that differ in one client, and compare the models", False, of_twins),
    "partition": Measure("partition the data, and count", False, _of_partition),
    "inversion": Measure("reconstruct images from single-example uploads at the initial model", False, _of_inversion),
    "inversion-after": Measure("train, then reconstruct images from single-example uploads", True, _of_inversion),
    "labels-after": Measure("train, then read labels off the model's outputs", True, _of_labels),
    "attribute-after": Measure("train, then infer an attribute from the model's features", True, _of_attribute),
    "extraction-after": Measure("train, then train a student on the model's answers", True, _of_extraction),
    "generated": Measure("train with a curious client in it that trains a generator, and judge its images", False, _of_generated),
    "clients-after": Measure("train, then find out which client sent which upload", True, _of_clients),
}
MEASURES: Registry[Measure] = Registry("measure.name", "measurement", _GENERAL, kind="measure")
