"""Measurements that attack: what an adversary reads off uploads of a configuration's own mechanism, or off its final model.

Uploads are made by the round's own client code and leave through the door; nothing is added here. The attacked examples are
the first of the test split. Attackers are naive: they are told the learning rate, and neither labels nor noise nor masks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.attacks import metrics
from fedveil.attacks.attack_registry import attack as attack_of
from fedveil.attacks.attack_types import Bounds, Knowledge
from fedveil.attacks.attack_types import CapturedUpload as Seen
from fedveil.attacks.attack_types import KnownTraining as LocalSpec
from fedveil.attacks.attribute import CIFAR10_ANIMALS, infer_attribute
from fedveil.attacks.extraction import KnowledgeExtraction
from fedveil.attacks.features import features
from fedveil.attacks.identification import gradient_scores, identify
from fedveil.attacks.intercept import intercepted
from fedveil.attacks.label_reconstruction import from_outputs
from fedveil.attacks.pictures import save_comparison
from fedveil.configuration.config import Config
from fedveil.errors import ConfigError
from fedveil.federation.clients import Clients
from fedveil.federation.progress import Federation
from fedveil.federation.round import Task, client_round
from fedveil.ledger.ledger import Ledger
from fedveil.release.plan import Released, Upload
from fedveil.run.assembly import Prepared, build_model, federation, prepare
from fedveil.studies.reproduce.collect import Measured


@dataclass(frozen=True)
class Scene:
    """A configuration at one moment: the initial model, or the last one of a run.

    Args:
        model: the global model [d]. round: the round whose uploads are looked at, from 0.
    """

    config: Config
    prepared: Prepared
    job: Federation
    model: Tensor
    round: int

    def network(self) -> nn.Module:
        """The network at the global model."""
        flat = build_model(self.config, self.prepared)
        flat.load(self.model)
        return flat.module

    def upload(self, client: int, clients: Clients) -> Seen:
        """What this client sends in the round, as an attacker sees it who is told the rate of its steps."""
        context = replace(self.job.context, clients=clients)
        task = Task(client, Released(self.round, self.model, None), 1.0, None, context.policy.start())
        outcome = client_round(context, task)
        if not isinstance(outcome.release, Upload):
            raise ConfigError(f"no upload to attack: {outcome.error or 'uploads are summed; set privacy.view = server'}")
        spec = self.job.setting.local
        steps = spec.steps_for(clients.size(client))
        local = LocalSpec(steps, spec.learning_rate(self.round, 0, steps), spec.batch_size, spec.optimizer.name)
        return intercepted(outcome.release, context.door.layout, clients.size(client), local)


def inversion(
    config: Config,
    run: Path | None,
    folder: Path,
    *,
    attack: str = "ig",
    images: int = 10,
    settings: dict[str, Any] | None = None,
) -> Measured:
    """Mean scores of reconstructions, each from one upload after one step on one image.

    Each client holds copies of its image, as many as clients have examples, so that noise which depends on their number is
    that of the run.

    Args:
        folder: gets reconstruction.png, originals above reconstructions. images: attacked images. settings: of the attack (see
            `fedveil.attacks.attack`).
    """
    one = config.model_copy(update={"training": config.training.model_copy(update={"local_steps": 1, "batch_size": 1})})
    with _scene(one, run) as scene:
        x, bounds, copies = scene.prepared.test[0][:images], bounds_of(scene.prepared), scene.job.setting.records
        y, attacker = scene.prepared.test[1][:images], attack_of(attack, **(settings or {}))
        found = []
        for i in range(images):
            offsets = np.array([0] * (i + 1) + [copies], dtype=np.int64)
            upload = scene.upload(i, Clients(x[i : i + 1].expand(copies, *x.shape[1:]), y[i : i + 1].expand(copies), offsets))
            assert upload.local is not None
            seen = replace(upload, n_examples=1, local=replace(upload.local, batch=None))
            network, rng, knowledge = scene.network(), torch.Generator().manual_seed(i), Knowledge(n=1, local=seen.local)
            result = attacker.run([seen], partial(_same, network), network.state_dict(), knowledge, bounds, rng)
            found.append(result.images)
    truth, made = bounds.images(x), torch.cat(found)
    if truth.ndim == 4 and truth.shape[1] in (1, 3):
        folder.mkdir(parents=True, exist_ok=True)
        save_comparison(folder / "reconstruction.png", truth[:10], [(f"{attack}, {config.method.name}", made[:10])])
    scores = metrics.score(made, truth)
    norms = (metrics.mse(made, truth) * truth[0].numel()).sqrt()
    series = {"mse": scores.mse, "mae": scores.mae, "psnr": scores.psnr, "l2": norms.tolist()}
    if scores.ssim is not None:
        series["ssim"] = scores.ssim
    return {name: [(1, float(np.mean(values)))] for name, values in series.items()}


def label_reconstruction(config: Config, run: Path | None, folder: Path, *, images: int = 1000) -> Measured:
    """Share of the test images whose label is the model's answer: rule "output", which follows the model's accuracy."""
    with _scene(config, run) as scene:
        network = scene.network()
        x, y = scene.prepared.test
        result = from_outputs(x[:images], y[:images], lambda: network, network.state_dict())
    return {"accuracy": [(1, result.accuracy)], "constant_guess": [(1, result.constant_guess)]}


def attribute_inference(config: Config, run: Path | None, folder: Path, *, known: int = 2000, images: int = 1000) -> Measured:
    """Whether an image shows an animal (CIFAR-10), by a probe on the model's features fitted on `known` other test images."""
    if config.data.name != "cifar10":
        raise ConfigError(f"the attribute 'animal or not' is that of cifar10, not of {config.data.name}")
    with _scene(config, run) as scene:
        x, y = scene.prepared.test
        animal = torch.isin(y, torch.tensor(CIFAR10_ANIMALS))[: known + images]
        found = features(scene.network(), x[: known + images])
    result = infer_attribute(found[:known], animal[:known], found[known:], animal[known:])
    figures = {"accuracy": result.accuracy, "balanced_accuracy": result.balanced_accuracy, "auc": result.auc}
    return {name: [(1, value)] for name, value in figures.items()}


def knowledge_extraction(config: Config, run: Path | None, folder: Path, *, queries: int = 5000, epochs: int = 50) -> Measured:
    """A fresh network trained on the model's answers to the first test images, and scored on the others."""
    with _scene(config, run) as scene:
        x, y = scene.prepared.test
        if queries >= len(x):
            raise ConfigError(f"measure.queries = {queries} leaves none of the {len(x)} test images to score on")
        student = build_model(config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})}), scene.prepared).module
        rng = torch.Generator().manual_seed(config.run.seed)
        attacker = KnowledgeExtraction(epochs=epochs)
        _, result = attacker.run(scene.network(), lambda: student, x[:queries], (x[queries:], y[queries:]), rng)
    figures = {"victim": result.victim_accuracy, "student": result.student_accuracy, "agreement": result.agreement}
    return {name: [(1, value)] for name, value in figures.items()}


def client_identification(config: Config, run: Path | None, folder: Path, *, targets: int = 10, probes: int = 10) -> Measured:
    """Share of target clients whose upload is found among all clients', by the gradient on probe images of each target.

    Args:
        targets: clients looked for, the first ones. probes: images that the attacker holds of each.
    """
    with _scene(config, run) as scene:
        clients, network = scene.prepared.clients, scene.network()
        seen = [scene.upload(c, clients) for c in range(len(clients)) if clients.size(c)]
        owned = [c for c in range(len(clients)) if clients.size(c)]
        held = [tuple(part[:probes] for part in clients.examples(c)) for c in owned[:targets]]
        mean = [replace(u, local=replace(_known(u), batch=None)) for u in seen]
        knowledge = Knowledge(local=_known(mean[0]))
        scores = gradient_scores(mean, [(x, y) for x, y in held], lambda: network, network.state_dict(), knowledge)
    result = identify(scores, range(min(targets, len(owned))), "gradient")
    figures = {"matched": result.matched, "top": result.top, "tpr": result.tpr, "chance": result.chance_matched}
    return {name: [(1, value)] for name, value in figures.items()}


def bounds_of(prepared: Prepared) -> Bounds:
    """The box of one example in the network's units: of pixels from black to white, of signals what the test split spans."""
    info = prepared.dataset.info
    if info.scale == 1.0:
        x = prepared.test[0].transpose(0, 1).flatten(1)
        return Bounds(info.input_shape, tuple(x.amin(1).tolist()), tuple(x.amax(1).tolist()))
    pairs = list(zip(info.mean, info.std, strict=True))
    return Bounds(info.input_shape, tuple(-m / s for m, s in pairs), tuple((1 - m) / s for m, s in pairs))


@contextmanager
def _scene(config: Config, run: Path | None) -> Iterator[Scene]:
    """The initial model, or the last one of the run in `run`."""
    prepared = prepare(config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        Ledger.create(path, "attacked", {}).close()
        job = federation(config, prepared, path, "attacked")
        model, round_index = job.context.model.vector.clone(), 0
        if run is not None:
            model, round_index = _final(run, job), config.training.rounds - 1
        yield Scene(config, prepared, job, model, round_index)


def _final(run: Path, job: Federation) -> Tensor:
    from safetensors.torch import load_file

    layers = load_file(run / "model.safetensors")
    return torch.cat([layers[name].flatten() for name in job.context.model.layout.names])


def _same(module: nn.Module) -> nn.Module:
    return module


def _known(upload: Seen) -> LocalSpec:
    assert upload.local is not None
    return upload.local
