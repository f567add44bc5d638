"""A recipe and `fedveil attack` attack the same release of a run, from the states that the run saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.attacks import interception
from fedveil.attacks.attack_options import AttackOptions
from fedveil.attacks.attack_run import attack, attacked
from fedveil.attacks.interception import Interception, holders_of_test_images, holding, interception_of
from fedveil.attacks.snapshot import snapshot_of
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, parse
from fedveil.experiment.resolve import opened
from fedveil.experiment.run import run
from fedveil.studies.reproduce import measurements, running_time
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.reproduce.recipe_files import load_recipe

Collect = Callable[[], list[Interception]]


def config_of(method: str) -> Config:
    return parse(
        {
            "data": {"name": "digits", "partition": {"kind": "iid", "clients": 4}},
            "model": {"name": "mlp", "hidden": [12]},
            "method": {"name": method},
            "training": {"rounds": 2, "batch_size": 64, "local_epochs": 2, "optimizer": {"lr": 0.1}},
            "privacy": {"epsilon": 50.0, "delta": 1e-3, "view": "server"},
            "run": {"engine": "inline"},
        }
    )


@pytest.fixture(scope="module", params=["fedglp-adp", "aldp-fl"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """A run whose policies, and for FedGLP-ADP clients too, have states of their own."""
    config = config_of(request.param)
    return config, run(config, tmp_path_factory.mktemp("saved") / "run").path


@pytest.fixture
def intercepted(monkeypatch: pytest.MonkeyPatch) -> Collect:
    """All that was intercepted since it was asked the last time."""
    found: list[Interception] = []

    def recorded(*arguments: Any) -> Interception:
        found.append(interception_of(*arguments))
        return found[-1]

    def watch() -> list[Interception]:
        since = list(found)
        found.clear()
        return since

    monkeypatch.setattr(interception, "interception_of", recorded)
    return watch


def same(a: list[Interception], b: list[Interception]) -> bool:
    """Whether tensors, noise and masks of all uploads are equal to the bit, and come from the same clients."""

    def upload(i: Interception) -> list[Any]:
        u = i.upload
        noise = {k: torch.as_tensor(std) for k, std in (u.noise_std or {}).items()}
        whole = [{k: t.numpy().tobytes() for k, t in part.items()} for part in (u.tensors, u.sent_mask or {}, noise)]
        return [[v.client for v in i.victims], u.local, u.n_examples, *whole]

    return bool(a) and [upload(i) for i in a] == [upload(i) for i in b]


def test_reconstructions_start_from_the_same_uploads(saved: tuple[Config, Path], intercepted: Collect, tmp_path: Path) -> None:
    config, path = saved
    settings = {"steps": 2, "restarts": 1}
    recipe = MEASURES["inversion-after"].series(config, path, tmp_path, attack="idlg", images=3, settings=settings)
    by_recipe = intercepted()
    options = AttackOptions(images=3, round=2, knows=(), steps=2, restarts=1)
    done = attack(path, "idlg", options, overrides=["attack.examples=test"], out=tmp_path)
    by_command = intercepted()
    assert same(by_recipe, by_command)
    assert [i.upload.local.steps for i in by_recipe if i.upload.local] == [1, 1, 1]
    assert torch.equal(torch.cat([i.x for i in by_recipe]), snapshot_of(*opened(config)).federation.test[0][:3])
    assert recipe["mse"][0][1] == pytest.approx(sum(done.record["each"]["mse"]) / 3)
    assert recipe["mae"][0][1] == pytest.approx(sum(done.record["each"]["mae"]) / 3)
    assert done.files[0].name == "attack-idlg-knows-nothing-round-2-examples-test.json"


def test_clients_are_looked_for_among_the_same_uploads(saved: tuple[Config, Path], intercepted: Collect, tmp_path: Path) -> None:
    config, path = saved
    recipe = MEASURES["clients-after"].series(config, path, tmp_path, targets=2, probes=5)
    by_recipe = intercepted()
    own = ["attack.examples=all", "attack.targets=2", "attack.probes=5"]
    done = attack(path, "identification", AttackOptions(round=2, knows=()), overrides=own, out=tmp_path)
    assert same(by_recipe, intercepted())
    assert [len(i.y) for i in by_recipe] == snapshot_of(*opened(config)).federation.context.clients.sizes().tolist()
    assert recipe["matched"][0][1] == done.record["matched"]


def test_the_saved_states_count(saved: tuple[Config, Path]) -> None:
    config, path = saved
    snapshot = snapshot_of(*opened(config), path, last=True)
    assert snapshot.progress.policies
    fresh = replace(snapshot, progress=replace(snapshot.progress, policies={}, privates={}))
    options = AttackOptions(knows=(), examples="all")
    with_states, again, without = (list(interception.interceptions(s, options, 4, 1)) for s in (snapshot, snapshot, fresh))
    assert same(with_states, again)
    assert not same(with_states, without)


def test_a_copy_of_a_test_image_counts_as_a_whole_client(saved: tuple[Config, Path]) -> None:
    config, _ = saved
    snapshot = snapshot_of(*opened(config)).one_step()
    held = holders_of_test_images(snapshot, 6)
    assert [v.client for v in held] == [0, 1, 2, 3, 0, 1]
    assert holding(held[5], 4).sizes().tolist() == [0, snapshot.federation.setting.records, 0, 0]
    assert torch.equal(holding(held[5], 4).examples(1)[0][-1], snapshot.federation.test[0][5])
    with pytest.raises(ConfigError, match="5000 test images are to be attacked, and digits has 360"):
        holders_of_test_images(snapshot, 5000)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("ig", {"examples": "all"}, "attack ig takes drawn or test"),
        ("identification", {"examples": "test"}, "attack identification takes drawn or all"),
        ("labels", {"examples": "test"}, "attack labels takes drawn"),
        ("ig", {"examples": "tests"}, "give drawn, all, test"),
        ("ig", {"examples": "test", "batch": 2}, "leave --batch out"),
    ],
)
def test_examples_that_do_not_fit_are_refused(kind: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        attack(tmp_path / "none.toml", kind, AttackOptions(**options))


def test_small_networks_take_as_long_as_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 images in 15 rows of 4,800 steps: where an evaluation takes a second, no estimate is below 36 million of them."""
    monkeypatch.setattr(running_time, "_evaluation", lambda: 1.0)
    monkeypatch.setattr(running_time, "_per_operation", lambda forward: 1e-13)
    monkeypatch.setattr(running_time, "available_cores", lambda: 1)
    assert running_time.seconds_of(load_recipe("noisy-fedavg/table-14"), "paper") == pytest.approx(15 * 500 * 4800, rel=0.01)


def test_the_estimate_counts_what_the_user_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-18 takes 1.1e9 operations an image, LeNet-5 1.3e6: days become minutes."""
    monkeypatch.setattr(running_time, "_per_operation", lambda forward: 1e-11)
    monkeypatch.setattr(running_time, "_per_number", lambda: 0.0)
    table = load_recipe("noisy-fedavg/table-5")
    whole = running_time.seconds_of(table, "paper")
    assert running_time.seconds_of(table, "paper", overrides=["model.name=lenet5"]) < whole / 100


def test_only_reconstruction_attacks_invert(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"measure\.attack = 'idgl': unknown attack \(did you mean 'idlg'"):
        MEASURES["inversion"].series(config_of("aldp-fl"), None, tmp_path, attack="idgl")


def test_generated_images_are_judged_class_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `fedveil attack --kind gan` records: distances with their floors, of the private class and of both owned ones."""
    records: list[Any] = []

    def watched(kind: str, options: AttackOptions, *run: Any) -> Any:
        assert (kind, options.settings["private"], options.settings["controls"]) == ("gan", 3, [1, 7])
        snapshot, outcome = attacked(kind, options, *run)
        records.append(outcome.record)
        return snapshot, outcome

    monkeypatch.setattr(measurements, "attacked", watched)
    settings = {"private": 3, "controls": [1, 7], "judge_epochs": 2}
    measure = MEASURES["generated"]
    series = measure.series(config_of("dp-fedavg"), None, tmp_path, settings=settings, images=30, steps=2, batch=8)
    found = {name: value for name, ((_, value),) in series.items()}
    (record,) = records
    for name, scores in zip(("private", "public_1", "public_2"), (record["private"], *record["owned"]), strict=True):
        wanted = (scores["distance"], scores["same_source"], scores["class_rate"], scores["n"])
        assert tuple(found[f"{what}_{name}"] for what in ("distance", "floor", "rate", "n")) == wanted
        assert 0 < found[f"floor_{name}"] < found[f"distance_{name}"]
    assert [one["class"] for one in record["owned"]] == [1, 7]
    assert found["accuracy"] == record["accuracy"]
    assert (tmp_path / "generated.png").is_file()
    assert json.loads((tmp_path / "attack.json").read_text())["judge_sha256"] == record["judge_sha256"]
