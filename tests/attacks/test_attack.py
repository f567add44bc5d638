"""Attacks on what a run's own door lets out, on 8x8 digits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch.nn import functional as F

from fedveil.attacks import metrics
from fedveil.attacks.attack_options import KNOWS, PUBLIC, AttackOptions, AttackOutcome, known_as
from fedveil.attacks.attack_run import attack, name_of
from fedveil.attacks.attack_table import configured
from fedveil.attacks.interception import Interception, interceptions, local_spec, number, victims
from fedveil.attacks.reconstruction import DLG, IG
from fedveil.attacks.snapshot import Snapshot, snapshot_of, target_of
from fedveil.errors import ConfigError
from fedveil.experiment.config_files import load_config
from fedveil.experiment.resolve import opened
from fedveil.experiment.run import run
from fedveil.federation.before_round import released
from fedveil.federation.progress import start
from fedveil.mechanism.plan import Plan
from fedveil.methods.base import Fixed
from method_kit import job_of, planner, spec_of

CONFIG: dict[str, Any] = {
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 8}},
    "model": {"name": "mlp", "hidden": [48]},
    "method": {"name": "dp-fedavg", "clip": 5.0},
    "training": {"rounds": 2, "clients_per_round": 4, "batch_size": 16, "sampling": "fixed", "optimizer": {"lr": 0.1}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "view": "server"},
    "run": {"engine": "inline"},
}


def nothing(done: int, total: int, what: str) -> None:
    assert 0 <= done <= total


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "digits.toml"
    path.write_text(tomli_w.dumps(CONFIG))
    return path


@pytest.fixture
def made(tmp_path: Path, config: Path) -> Path:
    return run(load_config(config), tmp_path / "run").path


def at(config: Path, *overrides: str, seed: int = 0) -> Snapshot:
    found, run = target_of(config, overrides)
    return snapshot_of(*opened(found), run, seed=seed)


def intercept(snapshot: Snapshot, count: int, batch: int, knows: tuple[str, ...] = PUBLIC, seed: int = 0) -> list[Interception]:
    return list(interceptions(snapshot, AttackOptions(knows=knows, seed=seed), count, batch))


def releasing(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """The snapshot with another plan in its door."""
    context = replace(snapshot.federation.context, policy=planner(Fixed(plan), snapshot.federation.setting))
    return replace(snapshot, federation=replace(snapshot.federation, context=context))


def ig(snapshot: Snapshot, **options: Any) -> dict[str, Any]:
    chosen = AttackOptions(**{"images": 2, "steps": 150, **options})
    outcome: AttackOutcome = configured("ig", chosen).on(snapshot, chosen, nothing)
    return dict(outcome.record)


# --- the attack sees what the door let out, and nothing else ---------------------------------------------------------------


def test_without_a_defence_images_come_back_and_under_the_doors_noise_they_do_not(config: Path) -> None:
    snapshot = at(config)
    open_, defended = ig(snapshot.without_defence()), ig(snapshot)
    assert min(open_["each"]["psnr"]) > 30
    assert max(defended["each"]["psnr"]) < max(s["psnr_median"] for s in defended["floors"].values())
    assert min(defended["noise_ratio"]) > 10
    assert open_["noise_ratio"] == [0.0, 0.0]


def test_one_layer_without_noise_gives_all_away_to_who_knows_it(config: Path) -> None:
    """The first matrix leaves clean, as a published method leaves layers: told apart by noise, it is as good as no defence."""
    noise = torch.tensor([50.0 if name != "fc1.weight" else 0.0 for name in at(config).layout.names])
    snapshot = releasing(at(config), Plan(noise_std=noise))
    assert min(ig(snapshot, knows=("noise", "labels"))["each"]["psnr"]) > 25
    assert max(ig(snapshot, knows=("labels",))["each"]["psnr"]) < 15


def test_a_mask_that_the_attacker_knows_costs_him_little(config: Path) -> None:
    snapshot = at(config)
    support = torch.rand(snapshot.layout.dimension, generator=torch.Generator().manual_seed(0)) < 0.3
    masked = releasing(snapshot, Plan(support=support))
    informed, naive = ig(masked, knows=("mask", "labels")), ig(masked, knows=("labels",))
    assert min(informed["each"]["psnr"]) > 30
    assert min(informed["each"]["psnr"]) > max(naive["each"]["psnr"]) + 10


def test_the_clip_that_the_attacker_knows_is_undone(config: Path) -> None:
    """DLG matches sizes, so a clipped update misleads it unless it clips its candidates alike."""
    snapshot = releasing(at(config, "model.activation='sigmoid'"), Plan(clip=1e-3))
    options = AttackOptions(images=1, steps=30, restarts=1, knows=("clip", "labels"))
    both = (options, replace(options, knows=("labels",)))
    informed, naive = (DLG(steps=30, restarts=1).on(snapshot, o, nothing).record["each"]["psnr"][0] for o in both)
    assert informed > 40 > 20 > naive


# --- interception ------------------------------------------------------------------------------------------------------------


def test_an_intercepted_upload_is_the_clients_own_change_of_weights(config: Path) -> None:
    snapshot = at(config, "method={name='fedavg'}", "privacy={view='server'}")
    (seen,) = intercept(snapshot, 1, 3, seed=4)
    model = snapshot.make_model()
    F.cross_entropy(model(seen.x), seen.y).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.allclose(seen.upload.tensors[name], -0.1 * p.grad, atol=1e-6)
    assert seen.upload.signal_norm == pytest.approx(float(torch.cat([t.flatten() for t in seen.upload.tensors.values()]).norm()))
    assert seen.known.names == ("n", "local", "noise_std", "clip", "aux_inputs")


def test_noise_and_clip_of_an_upload_are_those_of_the_method(config: Path) -> None:
    snapshot = at(config, "method.clip=0.01")
    (seen,) = intercept(snapshot, 1, 1, ("noise",))
    values = torch.cat([t.flatten() for t in seen.upload.tensors.values()])
    assert float(values.std()) == pytest.approx(0.01, rel=0.05)
    assert seen.upload.signal_norm == pytest.approx(0.01, rel=1e-4)
    assert seen.upload.noise_ratio == pytest.approx(math.sqrt(snapshot.layout.dimension), rel=1e-4)


def test_noise_inside_local_training_is_counted(config: Path) -> None:
    """The door of such a method adds nothing, so its own account of noise would say r = 0."""
    method = ["method={name='fedglp-adp', variant='published'}", "privacy={epsilon=4.0, delta=1e-3, view='server'}"]
    snapshot = at(config, *method)
    (seen,) = intercept(snapshot, 1, 1, ("noise",))
    (clear,) = intercept(snapshot.without_defence(), 1, 1, ())
    noise = torch.cat([t.flatten() for t in seen.upload.tensors.values()]).norm() ** 2 - (seen.upload.signal_norm or 0) ** 2
    assert seen.upload.noise_ratio == pytest.approx(float(noise) ** 0.5 / (seen.upload.signal_norm or 0), rel=0.05)
    assert seen.upload.noise_ratio > 1
    assert clear.upload.noise_ratio == 0


def test_coordinates_that_a_client_leaves_out_are_seen_as_left_out(config: Path) -> None:
    """Published FedANC sends the coordinates that it noised; the door does not know which."""
    snapshot = at(config, "method={name='fedanc', variant='published'}", "privacy={epsilon=4.0, delta=1e-3, view='server'}")
    (seen,) = intercept(snapshot, 1, 1, ("mask", "noise"))
    assert seen.known.mask is not None
    share = torch.cat([m.flatten() for m in seen.known.mask.values()]).float().mean()
    assert 0 < float(share) < 1
    for name, mask in seen.known.mask.items():
        assert torch.equal(mask, seen.upload.tensors[name] != 0)


def test_the_seed_of_an_attack_fixes_the_noise_and_another_seed_changes_it(config: Path) -> None:
    first, again, other = (intercept(at(config, seed=s), 1, 1)[0] for s in (1, 1, 2))
    assert torch.equal(first.x, other.x)
    assert torch.equal(first.upload.tensors["fc1.weight"], again.upload.tensors["fc1.weight"])
    assert not torch.equal(first.upload.tensors["fc1.weight"], other.upload.tensors["fc1.weight"])


def test_a_sum_shows_the_mean_of_its_participants(config: Path) -> None:
    snapshot = releasing(at(config, "privacy.view='aggregate'"), Plan(noise_std=0.0, place="sum"))
    (seen,) = intercept(snapshot, 3, 2)
    assert number(snapshot, 3, PUBLIC) == 1
    assert len(seen.victims) == 4
    model = snapshot.make_model()
    F.cross_entropy(model(seen.x), seen.y).backward()
    sent = seen.upload.tensors["fc1.weight"]
    expected = dict(model.named_parameters())["fc1.weight"].grad
    assert expected is not None
    assert torch.allclose(sent, -0.1 * expected, atol=1e-6)
    assert seen.known.clip is None


@pytest.mark.parametrize("place", ["sum", "upload"])
def test_who_knows_all_others_is_left_with_one_update_and_its_noise(config: Path, place: Any) -> None:
    snapshot = releasing(at(config, "privacy.view='aggregate'"), Plan(noise_std=0.01, place=place))
    knows = (*PUBLIC, "others")
    (seen,) = intercept(snapshot, 1, 1, knows)
    model = snapshot.make_model()
    F.cross_entropy(model(seen.x), seen.y).backward()
    grad = dict(model.named_parameters())["fc1.weight"].grad
    assert grad is not None
    noise = seen.upload.tensors["fc1.weight"] + 0.1 * grad
    assert float(noise.std()) == pytest.approx(0.01, rel=0.05)
    assert seen.upload.noise_std == pytest.approx(dict.fromkeys(snapshot.layout.names, 0.01))
    assert number(snapshot, 5, knows) == 5


def test_victims_are_different_examples_of_different_clients(config: Path) -> None:
    snapshot = at(config)
    chosen = victims(snapshot, 20, 2, np.random.default_rng(0))
    assert len({v.client for v in chosen[:8]}) == 8
    rows = torch.cat([v.x.flatten(1) for v in chosen])
    assert len(torch.unique(rows, dim=0)) > 35
    with pytest.raises(ConfigError, match="lower --images"):
        victims(snapshot, 9999, 2, np.random.default_rng(0))


def test_local_training_is_told_as_it_is() -> None:
    optimizer = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}
    spec = spec_of(local_epochs=2, batch_size=4, optimizer=optimizer, batch_clip=3.0, schedule="cyclic")
    known = local_spec(spec, 6, round=5)
    assert (known.steps, known.batch, known.momentum, known.weight_decay, known.batch_clip) == (4, 4, 0.9, 0.01, 3.0)
    assert known.rates == pytest.approx((0.2, 0.1, 0.2 / 3, 0.05))
    assert known.lr == pytest.approx(sum((0.2, 0.1, 0.2 / 3, 0.05)) / 4)
    assert local_spec(spec_of(batch_size=4, optimizer={"name": "adam", "lr": 0.2}), 1, 0).rates is None


def test_an_attacked_client_plans_with_what_the_run_makes_of_public_examples(config: Path) -> None:
    changes = "method.name=fed-smp", "method.mask=public", "method.share=0.1", "data.public_fraction=0.2"
    here = at(config, *changes)
    assert here.released.public_loss is not None
    update = here.released.public_update
    assert update is not None
    (sent,) = intercept(here, 1, 1)
    assert sent.upload.sent_mask is not None
    support = torch.cat([sent.upload.sent_mask[name].reshape(-1) for name in here.layout.names])
    assert int(support.sum()) == round(0.1 * len(update))
    job = job_of(target_of(config, changes)[0])
    assert update.equal(released(job, start(job)).public_update)  # type: ignore[arg-type]
    again = at(config, "method.name=fed-smp", "method.mask=public", "method.share=0.1", "data.public_fraction=0.2", seed=3)
    assert update.equal(again.released.public_update)  # type: ignore[arg-type]
    assert float(update[support].abs().min()) >= float(update[~support].abs().max())


# --- files, names, errors ----------------------------------------------------------------------------------------------------


def test_a_run_is_attacked_at_its_beginning_and_at_its_end(made: Path) -> None:
    config, path = target_of(made, [])
    first, last = snapshot_of(*opened(config), path), snapshot_of(*opened(config), path, last=True)
    assert (first.progress.round, last.progress.round) == (0, 2)
    assert torch.equal(first.progress.model, first.federation.context.model.vector)
    assert not torch.equal(first.progress.model, last.progress.model)
    assert snapshot_of(*opened(config), path, round=2).progress.round == 2
    with pytest.raises(ConfigError, match="round 0 and of round 2"):
        snapshot_of(*opened(config), path, round=1)
    with pytest.raises(ConfigError, match=r"attack .*config\.toml"):
        target_of(made, ["training.rounds=3"])
    with pytest.raises(ConfigError, match="not a run directory"):
        target_of(made.parent, [])


def test_attacks_of_a_run_lie_in_its_directory_with_everything_about_them(made: Path) -> None:
    found = attack(made, "ig", AttackOptions(images=2, steps=30, seed=7, defence="none"), overrides=["attack.tv=0.01"])
    assert [f.name for f in found.files] == ["attack-ig-no-defence.json", "attack-ig-no-defence.png"]
    assert found.files[1].read_bytes().startswith(b"\x89PNG")
    record = json.loads(found.files[0].read_text())
    assert record["attacked"]["method"] == "none (raw updates)"
    assert record["attacked"]["round"] == 0
    assert record["options"]["seed"] == 7
    assert record["releases"][0]["settings"]["tv"] == 0.01
    assert record["releases"][0]["seed"] == 7
    assert record["releases"][0]["restarts"] == 1
    assert record["noise_ratio"] == [0.0, 0.0]
    assert set(record["floors"]) == {"mean image", "other image", "uniform"}
    assert len(record["each"]["psnr"]) == 2
    assert any("no defence" in line for line in record["assumptions"])
    assert any("the noise std of each layer" in line for line in record["assumptions"])


def test_a_configuration_is_trained_up_to_the_attacked_round(config: Path) -> None:
    reported: list[tuple[int, int, str]] = []
    options = AttackOptions(images=1, steps=5, round=2)
    found = attack(config, "ig", options, out=config.parent / "out", on_progress=lambda *step: reported.append(step))
    assert reported[:2] == [(1, 2, "training"), (2, 2, "training")]
    assert [done for done, total, _ in reported[2:]] == [1, 2, 3, 4, 5]
    assert {total for _, total, _ in reported[2:]} == {5}
    assert found.record["attacked"]["round"] == 2
    assert found.files[0] == config.parent / "out" / "attack-ig-round-2.json"
    with pytest.raises(ConfigError, match="has 2 rounds"):
        attack(config, "ig", AttackOptions(round=3))


def test_names_of_files_tell_attacks_apart() -> None:
    names = [
        name_of("ig", o)
        for o in (
            AttackOptions(),
            AttackOptions(knows=("mask", "aux", "clip", "noise")),
            AttackOptions(knows=()),
            AttackOptions(knows=("labels", "mask")),
        )
    ]
    assert names == ["attack-ig", "attack-ig", "attack-ig-knows-nothing", "attack-ig-knows-mask-labels"]
    assert name_of("attribute", AttackOptions(round=1)) == "attack-attribute-round-1"
    assert known_as("mask, noise") == ("mask", "noise")
    assert known_as("none") == ()
    assert set(PUBLIC) < set(KNOWS)


@pytest.mark.parametrize(
    ("kind", "options", "overrides", "message"),
    [
        ("igg", {}, [], "did you mean 'ig'"),
        ("attribute", {"steps": 3}, [], "takes no --steps; it takes none of these options"),
        ("labels", {"restarts": 3}, [], "takes no --restarts; it takes --batch, --knows, --defence"),
        ("ig", {}, ["attack.speed=3"], "no setting speed"),
        ("labels", {}, ["attack.speed=3"], "no setting speed; it takes none"),
        ("identification", {}, ["attack.rule='magic'"], "give gradient or inversion"),
        ("label-reconstruction", {}, ["privacy.view='aggregate'"], "no single upload is visible. Set privacy.view = 'server'"),
        ("identification", {}, ["privacy.view='final'"], "in the final view only the last model is released"),
        ("ig", {}, ["privacy.view='final'"], "attack the model"),
        ("ig", {"images": 5000}, [], "lower --images"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(
    config: Path, kind: str, options: dict[str, Any], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attack(config, kind, AttackOptions(**options), overrides=overrides, out=config.parent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"knows": ("masks",)}, "did you mean 'mask'"),
        ({"defence": "some"}, "give run"),
        ({"images": 0}, "at least 1"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttackOptions(**options)


def test_scores_are_those_of_the_reconstructions(config: Path) -> None:
    outcome = IG(steps=40).on(at(config).without_defence(), AttackOptions(images=2), nothing)
    assert outcome.originals is not None
    ((_, images),) = outcome.rows
    assert outcome.record["each"]["psnr"] == pytest.approx(metrics.psnr(images, outcome.originals).tolist())
