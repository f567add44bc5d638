"""A curious client that trains a generator of a class it does not own on the models of a federation, passively or actively.

Passive (LaDP-FL, section VII-C): it follows the protocol and only looks at each global model. Active (Hitaj et al. 2017): it
also trains on generated images of the private class under a wrong label and uploads the result, so that the updates of the
others reveal more of that class. Neither recovers a record: a class that the attacker owns is the control.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np
import torch

from fedveil.attacks import gan
from fedveil.attacks.attack_options import Attack, AttackOptions, AttackOutcome, OnProgress, Place, setting
from fedveil.attacks.gan import (
    ClassScores,
    Fitting,
    class_scores,
    classifier_logits,
    fit,
    from_classifier,
    from_file,
    predictions,
    split_by_class,
)
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.federation.evaluation import evaluate
from fedveil.federation.fit import one_round
from fedveil.models import model_registry as registry
from fedveil.training.cores import one_thread

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fedveil.attacks.snapshot import Snapshot
    from fedveil.federation.clients import Clients


@dataclass(frozen=True)
class WithAttacker:
    """Clients, of which one, the attacker, has other examples. It has the interface of `Clients`."""

    honest: Clients
    attacker: int
    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.honest)

    def examples(self, client: int) -> tuple[Tensor, Tensor]:
        return (self.x, self.y) if client == self.attacker else self.honest.examples(client)

    def size(self, client: int) -> int:
        return len(self.y) if client == self.attacker else self.honest.size(client)

    @property
    def largest(self) -> int:
        return max(self.honest.largest, len(self.y))

    def sizes(self) -> NDArray[np.int64]:
        sizes = self.honest.sizes().copy()
        sizes[self.attacker] = len(self.y)
        return sizes


@dataclass(frozen=True)
class GanAttack(Attack):
    """Run a federation with a curious client in it, and score the images that the client generates.

    private: the class to generate. controls: owned classes; by default the class with most of the attacker's examples.
    fakes: mislabelled images per round (active), from round `warm` on. class_head: whether the attacker trains a class head.
    features: a file of `torch.export.save` from images in [0, 1] (n, *shape) to features (n, k), for the distance: with
    those of Inception it is FID. Without it they are the judge's.
    """

    name: ClassVar[str] = "gan"
    takes: ClassVar[tuple[str, ...]] = ("steps", "batch", "defence")
    place: ClassVar[Place] = "watched"
    private: int | None = setting(None, least=0)
    controls: tuple[int, ...] = ()
    mode: Literal["passive", "active"] = setting("passive", choices=("passive", "active"))
    attacker: int = setting(0, least=0)
    fakes: int = setting(500, least=1)
    warm: int = setting(1, least=0)
    lr: float = setting(2e-4, above=0)
    latent: int = setting(100, least=1)
    class_head: bool = False
    judge_epochs: int | None = setting(None, least=1)
    features: str = ""

    @one_thread()
    def on(self, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
        private = self._private_class(snapshot)
        own = _isolated(snapshot, self.attacker, private)
        controls = self._controls(own[1])
        config = gan.CuriousClient(
            private=(private,),
            steps=options.steps or 200,
            batch=options.batch or 64,
            lr=self.lr,
            latent=self.latent,
            train_class_head=self.class_head,
        )
        attacker, joined = self._run(snapshot, config, own, options, on_progress)
        images = options.images or 400
        judge = Judge.of(snapshot, self.judge_epochs, options)
        made = {c: gan.generate(attacker, c, images, options.generator(1)) for c in (private, *controls)}
        scores = {c: judge.scores(made[c], c, self.features) for c in made}
        wanted, n, owned = scores[private], len(own[1]), controls[0]
        accuracy = float(evaluate(snapshot.federation, snapshot.progress)["test_accuracy"])
        figures = {
            f"private class {private}": _line(wanted),
            **{f"owned class {c}, a control": _line(scores[c]) for c in controls},
            "floors of the private class": f"same source {wanted.same_source:.1f}, other classes {wanted.other_class:.1f}",
            "accuracy of the attacked model, of the judge": f"{accuracy:.1%}, {judge.accuracy:.1%}",
        }
        record = {
            "private": {"class": private, **asdict(wanted)},
            "owned": [{"class": c, **asdict(scores[c])} for c in controls],
            "generated": images,
            "accuracy": accuracy,
            "judge_accuracy": judge.accuracy,
            "judge_sha256": judge.digest,
            "settings": asdict(self),
            "steps_per_round": config.steps,
            "rounds_joined": joined,
        }
        mode, active = self.mode, f" and added {self.fakes} mislabelled images from round {self.warm} on"
        judged = f"a {judge.name} trained on public data (SHA-256 of its weights: {judge.digest[:16]}...)"
        words = [
            f"{mode} client {self.attacker} with {n} examples, none of class {private}; it sees every round's model",
            f"it took part in {joined} of {snapshot.progress.round} rounds{active if mode == 'active' else ''}",
            f"{wanted.metric} is a Frechet distance of features of {self.features or f'the judge, {judged}: it is not FID'}; "
            f"{wanted.n} images a side; fewer images give larger values",
            "what is generated is a prototype of the class, not a record; a less accurate model alone raises the distance",
        ]
        real = {c: split_by_class(judge.images, judge.labels, c)[0][:10] for c in made}
        rows = [("generated", made[private][:10]), (f"real, {owned}\n(owned)", real[owned]), ("generated", made[owned][:10])]
        enough = len(real[private]) == 10 and len(real[owned]) == 10
        return AttackOutcome(figures, record, words, real[private] if enough else None, rows, paired=False)

    def _run(
        self,
        snapshot: Snapshot,
        config: gan.CuriousClient,
        own: tuple[Tensor, Tensor],
        options: AttackOptions,
        on_progress: OnProgress,
    ) -> tuple[gan.Gan, int]:
        """Train the federation and, after each round, the attacker. Returns the attacker and its number of rounds as a client."""
        progress, rounds = snapshot.progress, options.round or snapshot.federation.setting.rounds
        job = replace(snapshot.federation, evaluate_every=rounds + 1)
        attacker = gan.start(config, snapshot.make_model, snapshot.info.classes, snapshot.bounds, options.generator())
        rng, client = options.generator(2), self.attacker
        for t in range(rounds):
            x, y = own
            if self.mode == "active" and t >= self.warm:
                x, y = _poisoned(attacker, own, config.private[0], self.fakes, rng)
            clients = cast("Clients", WithAttacker(snapshot.federation.context.clients, client, x, y))
            poisoned_job = replace(job, context=replace(job.context, clients=clients))
            with Inline(poisoned_job.context) as engine:
                one_round(poisoned_job, engine, progress)
            real, fake = gan.observe(attacker, config, snapshot.make_model, snapshot.state, own, rng)
            on_progress((t + 1) * config.steps, rounds * config.steps, f"round {t + 1}, losses {real:.2f} and {fake:.2f}")
        return attacker, progress.seen.get(client, 0)

    def _private_class(self, snapshot: Snapshot) -> int:
        clients, last = len(snapshot.federation.context.clients), snapshot.info.classes - 1
        if not self.attacker < clients:
            raise ConfigError(f"--set attack.attacker={self.attacker}: there are {clients} clients")
        wanted = self.private
        private: int = wanted if wanted is not None else (2 if snapshot.info.name == "cifar10" else min(5, last))
        if private > last:
            raise ConfigError(f"--set attack.private={wanted}: classes are 0 to {last}")
        return private

    def _controls(self, labels: Tensor) -> tuple[int, ...]:
        """Return the owned classes that the attacker also generates, as a control."""
        owned = sorted(set(labels.tolist()))
        wanted: tuple[int, ...] = self.controls or (int(labels.bincount().argmax()),)
        absent = [c for c in wanted if c not in owned]
        if absent:
            raise ConfigError(
                f"attack.controls = {list(wanted)}: the attacker holds nothing of class {absent[0]}, but of {owned}"
            )
        return wanted


def _poisoned(
    attacker: gan.Gan, own: tuple[Tensor, Tensor], private: int, fakes: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the attacker's data with generated images of the private class added under the label of an owned class."""
    made = attacker.bounds.inputs(gan.generate(attacker, private, fakes, rng))
    wrong = int(own[1].bincount().argmax())
    return torch.cat([own[0], made]), torch.cat([own[1], torch.full((fakes,), wrong)])


def _isolated(snapshot: Snapshot, attacker: int, private: int) -> tuple[Tensor, Tensor]:
    """Return the attacker's examples without those of the private class."""
    x, y = snapshot.federation.context.clients.examples(attacker)
    keep = y != private
    if not bool(keep.any()):
        raise ConfigError(f"client {attacker} holds nothing but class {private}: choose another with --set attack.attacker=N")
    return x[keep], y[keep]


@dataclass(frozen=True)
class Judge:
    """An independent classifier, and the real images in [0, 1] to which generated images are compared."""

    name: str
    module: nn.Module
    snapshot: Snapshot
    images: Tensor
    labels: Tensor
    accuracy: float

    @property
    def digest(self) -> str:
        """SHA-256 of the weights, tensor by tensor; equal digests mean equal features."""
        weights = [tensor.contiguous().numpy().tobytes() for tensor in self.module.state_dict().values()]
        return hashlib.sha256(b"".join(weights)).hexdigest()

    @classmethod
    def of(cls, snapshot: Snapshot, epochs: int | None, options: AttackOptions) -> Judge:
        """Train a judge on the first half of the public test set (at least 10 epochs, 20,000 examples), score it on the rest."""
        name = "cnn2"
        module = registry.build(name, snapshot.info.input_shape, snapshot.info.classes, options.seed)
        x, y = snapshot.federation.test
        half, clients = len(y) // 2, snapshot.federation.context.clients
        passes = max(10, -(-20_000 // half)) if epochs is None else epochs
        fit(module, x[:half], y[:half], options.generator(3), Fitting(passes))
        accuracy = float((predictions(module, x[half:]).argmax(1) == y[half:]).double().mean())
        images = snapshot.bounds.images(torch.cat([clients.x, x[half:]]))
        return cls(name, module, snapshot, images, torch.cat([clients.y, y[half:]]), accuracy)

    def scores(self, made: Tensor, label: int, file: str) -> ClassScores:
        """Score generated images of one class against the real images, by features of the judge or of a file."""
        to_inputs = self.snapshot.bounds.inputs
        extractor = from_classifier(f"{self.snapshot.info.name}-{self.name}", self.module, to_inputs)
        extractor = from_file(file) if file else extractor
        real, others = split_by_class(self.images, self.labels, label)
        spread = others[:: max(1, len(others) // max(len(real), 1))]
        return class_scores(made, real, spread, label, extractor, classifier_logits(self.module, to_inputs))


def _line(s: ClassScores) -> str:
    return f"{s.metric} {s.distance:.1f} (n = {s.n}), taken for the class by the judge: {s.class_rate:.0%}"
