"""The kinds of attack beside reconstruction, the command, and attacks in the report; on 8x8 digits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from typer.testing import CliRunner

from fedveil.attacks.attack_options import AttackOptions
from fedveil.attacks.attack_run import attack
from fedveil.attacks.gan_attack import WithAttacker, _isolated
from fedveil.attacks.reconstruction import distinct_ratios
from fedveil.attacks.release_attacks import middle
from fedveil.attacks.snapshot import snapshot_of, target_of
from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.experiment.recorded_run import RunData
from fedveil.experiment.resolve import opened
from fedveil.report.report import attack_values

CONFIG: dict[str, Any] = {
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 12}},
    "model": {"name": "mlp", "hidden": [32]},
    "method": {"name": "dp-fedavg", "clip": 5.0},
    "training": {"rounds": 2, "clients_per_round": 6, "batch_size": 32, "sampling": "fixed", "optimizer": {"lr": 0.3}},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "view": "server"},
    "run": {"engine": "inline"},
}
WITHOUT = AttackOptions(defence="none")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "digits.toml"
    path.write_text(tomli_w.dumps(CONFIG))
    return path


def record(config: Path, kind: str, options: AttackOptions, *overrides: str) -> dict[str, Any]:
    return attack(config, kind, options, overrides=overrides, out=config.parent / "out").record


def test_label_counts_are_read_without_a_defence_and_lost_in_noise(config: Path) -> None:
    clear = record(config, "labels", replace(WITHOUT, images=96, batch=32))
    noisy = record(config, "labels", AttackOptions(images=96, batch=32))
    assert clear["all_counts_right"] >= 2 / 3
    assert clear["labels_right"] > 0.97
    assert noisy["labels_right"] < clear["floors"]["all classes alike"]
    assert (clear["examples"], noisy["all_counts_right"]) == (96, 0)


def test_label_counts_of_a_sum_are_those_of_all_participants(config: Path) -> None:
    found = record(
        config, "labels", AttackOptions(images=30, batch=5), "privacy.view='aggregate'", "privacy.noise_multiplier=1e-7"
    )
    assert found["examples"] == 30
    assert found["labels_right"] > 0.9


def test_single_labels_by_both_rules(config: Path) -> None:
    clear, noisy = (record(config, "label-reconstruction", replace(o, images=40)) for o in (WITHOUT, AttackOptions()))
    assert clear["gradient"]["accuracy"] == 1
    assert noisy["gradient"]["accuracy"] < 0.5
    assert clear["output"] == noisy["output"]
    assert clear["output"]["accuracy"] < 0.5


@pytest.mark.parametrize("rule", ["gradient", "inversion"])
def test_clients_are_told_apart_without_a_defence_only(config: Path, rule: str) -> None:
    options = AttackOptions(images=12, batch=10, steps=None if rule == "gradient" else 30)
    settings = [f"attack.rule='{rule}'", "attack.targets=6", f"attack.probes={10 if rule == 'gradient' else 5}"]
    if rule == "inversion":
        options = replace(options, batch=5)
    clear = record(config, "identification", replace(options, defence="none"), *settings)
    assert clear["rule"] == rule
    assert (clear["targets"], clear["uploads"]) == (6, 12)
    assert clear["chance_matched"] == pytest.approx(1 / 12)
    if rule == "gradient":
        assert clear["matched"] == 1
        assert record(config, "identification", options, *settings)["matched"] < 0.7


def test_noise_ratios_that_are_unknown_are_left_out_and_those_without_signal_are_infinite() -> None:
    assert middle([1.0, None, 3.0]) == "2 (median)"
    assert middle([math.inf, math.inf, 1.0]) == "inf (median)"
    assert middle([None]) == "unknown"
    assert distinct_ratios([0.5, 0.5001, math.inf, None]) == "0.5, inf, unknown"


def test_attributes_of_training_examples_from_the_released_model(config: Path) -> None:
    found = record(config, "attribute", AttackOptions(images=300))
    assert found["attribute"] == "even digit"
    assert found["balanced_accuracy"] > 0.75
    assert found["n_test"] == 300
    own = record(config, "attribute", AttackOptions(images=200, round=0), "attack.classes=[0, 1]")
    assert own["attribute"] == "class in [0, 1]"
    assert own["constant_guess"] > 0.7


def test_extraction_copies_an_undefended_model(config: Path) -> None:
    undefended = ("method={name='fedavg'}", "privacy={view='server'}", "training.rounds=8")
    found = record(config, "extraction", AttackOptions(images=180), *undefended, "attack.epochs=30")
    assert found["victim_accuracy"] > 0.6
    assert found["agreement"] > 0.6
    assert found["queries"] == 180


def test_attributes_and_labels_of_public_test_images(config: Path) -> None:
    found = record(config, "attribute", AttackOptions(images=100), "attack.examples=test", "attack.auxiliary=300")
    assert (found["n_train"], found["n_test"]) == (300, 60)
    assert found["balanced_accuracy"] > 0.75
    labels = record(config, "label-reconstruction", replace(WITHOUT, images=30, examples="test"))
    assert labels["gradient"]["accuracy"] == 1
    with pytest.raises(ConfigError, match="leaves none of the 360 test examples"):
        record(config, "attribute", AttackOptions(), "attack.examples=test", "attack.auxiliary=360")


def test_a_student_of_another_seed_asks_as_much_as_it_may(config: Path) -> None:
    own, other = (
        record(config, "extraction", AttackOptions(images=300), "attack.epochs=3", *more) for more in ([], ["attack.student=1"])
    )
    assert own["queries"] == other["queries"] == 300
    assert own["held_out_kl"] != other["held_out_kl"]
    assert own["victim_accuracy"] == other["victim_accuracy"]
    with pytest.raises(ConfigError, match="360 queries leave none of the 360"):
        record(config, "extraction", AttackOptions(images=360))


@pytest.mark.parametrize("mode", ["active", pytest.param("passive", marks=pytest.mark.slow)])
def test_a_curious_client_takes_part_and_is_judged(config: Path, mode: str) -> None:
    settings = [
        f"attack.mode='{mode}'",
        "attack.private=3",
        "attack.controls=[1, 7]",
        "attack.attacker=1",
        "attack.fakes=7",
        "training.clients_per_round=12",
    ]
    found = record(config, "gan", AttackOptions(images=40, steps=3, batch=8), *settings, "attack.judge_epochs=2")
    assert found["private"]["class"] == 3
    assert found["private"]["metric"] == "FD-digits-cnn2"
    assert found["private"]["n"] == 40
    assert found["private"]["same_source"] < found["private"]["distance"]
    assert [one["class"] for one in found["owned"]] == [1, 7]
    assert len(found["judge_sha256"]) == 64
    assert found["rounds_joined"] == 2
    assert any("none of class 3" in line for line in found["assumptions"])
    assert any("7 mislabelled images from round 1 on" in line for line in found["assumptions"]) == (mode == "active")
    assert (config.parent / "out" / "attack-gan.png").is_file()


def test_the_judge_is_the_same_for_any_number_of_threads(config: Path) -> None:
    """More of them sum in another order: on pictures of 32x32 the judge has other bits, and distances change by up to half."""
    threads, seen, found = torch.get_num_threads(), list[int](), list[str]()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            heard = lambda *_: seen.append(torch.get_num_threads())  # noqa: E731
            options = AttackOptions(images=20, steps=1, batch=4)
            done = attack(config, "gan", options, overrides=["attack.judge_epochs=1"], out=config.parent, on_progress=heard)
            assert torch.get_num_threads() == n
            found.append(done.record["judge_sha256"])
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {1}
    assert found[0] == found[1]


def test_the_attackers_data_replace_his_own_and_nobody_elses(config: Path) -> None:
    snapshot = snapshot_of(*opened(target_of(config, [])[0]))
    honest = snapshot.federation.context.clients
    x, y = _isolated(snapshot, 2, 4)
    assert 0 < len(y) < honest.size(2)
    assert 4 not in y.tolist()
    held = WithAttacker(honest, 2, x, y)
    assert held.examples(2)[1] is y
    assert torch.equal(held.examples(3)[0], honest.examples(3)[0])
    assert (held.size(2), held.size(3)) == (len(y), honest.size(3))
    assert held.sizes().tolist() == [len(y) if c == 2 else honest.size(c) for c in range(12)]
    assert (len(held), held.largest) == (12, honest.largest)


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        ("identification", "targets=0", "targets = 0 is not possible: give a whole number of at least 1"),
        ("identification", "probes=-3", "probes"),
        ("identification", "tv=0.1", "leave it out"),
        ("ig", "lr=abc", "lr = abc is not possible: give a number above 0"),
        ("ig", "lr=0", "above 0"),
        ("ig", "tv=abc", "a number of at least 0"),
        ("ig", "tv=-1", "at least 0"),
        ("ig", "tv=nan", "a number"),
        ("ig", "restarts=2.5", "a whole number"),
        ("dlg", "line_search=foo", "give strong_wolfe"),
        ("gradinversion", "seeds=0", "at least 1"),
        ("gradinversion", "unique=1", "true or false"),
        ("gan", "attacker=abc", "a whole number of at least 0"),
        ("gan", "attacker=true", "a whole number"),
        ("gan", "fakes=-1", "at least 1"),
        ("gan", "latent=0", "at least 1"),
        ("extraction", "epochs=many", "a whole number"),
        ("attribute", "classes=3", "a list of whole numbers"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused_by_name(config: Path, kind: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(config, kind, AttackOptions(images=10), f"attack.{setting}")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("labels", AttackOptions(batch=500), "lower --batch"),
        ("labels", AttackOptions(images=5000, batch=5), "lower --images"),
        ("identification", AttackOptions(images=1), "--images of at least 2"),
        ("identification", AttackOptions(steps=60), "takes no --steps"),
    ],
)
def test_options_that_do_not_fit_are_refused(config: Path, kind: str, options: AttackOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(config, kind, options)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("gan", ["attack.mode='loud'"], "passive or active"),
        ("gan", ["attack.private=10"], "classes are 0 to 9"),
        ("gan", ["attack.attacker=12"], "there are 12 clients"),
        ("gan", ["attack.private=3", "attack.controls=[3]"], r"controls = \[3\]: the attacker holds nothing of class 3"),
        ("attribute", ["attack.colour=1"], "no setting colour; it takes classes, auxiliary"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config: Path, kind: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(config, kind, AttackOptions(images=10), *overrides)


# --- the command and the report ----------------------------------------------------------------------------------------------


def test_the_command_prints_figures_and_leaves_files(config: Path, tmp_path: Path) -> None:
    arguments = ["attack", str(config), "--kind", "ig", "--images", "2", "--steps", "20", "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(app, [*arguments, "--knows", "none", "--set", "attack.tv=0.01", "--set", "training.rounds=3"])
    assert done.exit_code == 0, done.output
    for words in ("PSNR, median", "floors: mean image", "nothing besides", "attack-ig-knows-nothing.json", "tv 0.01"):
        assert words in done.output
    printed = CliRunner().invoke(app, [*arguments, "--defence", "none", "--json"])
    assert json.loads(printed.stdout) == json.loads((tmp_path / "o" / "attack-ig-no-defence.json").read_text())


def test_a_report_shows_picture_figures_and_assumptions_of_an_attack_together(config: Path, tmp_path: Path) -> None:
    attack(config, "ig", AttackOptions(images=1, steps=2), out=tmp_path / "run")
    attack(config, "ig", replace(WITHOUT, images=1, steps=2), out=tmp_path / "run")
    (tmp_path / "run" / "attack-own.json").write_text('{"psnr": {"mean": 11.25}, "each": [1, 2]}')
    (tmp_path / "run" / "attack-broken.json").write_text("{")
    run = RunData(tmp_path / "run", {}, "", None, [], [], [], [], {}, {}, None, None)
    shown = {a["name"]: a for a in attack_values([run], [10**6])}
    assert list(shown) == ["broken", "ig", "ig-no-defence", "own"]
    assert shown["ig"]["picture"].startswith("data:image/png;base64,")
    assert "PSNR, median (least, most)" in dict(shown["ig"]["figures"])
    assert shown["ig"]["assumptions"][0].startswith("dp-fedavg on digits, server view, in round 0")
    assert shown["ig-no-defence"]["assumptions"][0].startswith("no defence")
    assert shown["own"]["figures"] == [["psnr.mean", "11.25"]]
    assert shown["broken"]["figures"] == [["not readable", "attack-broken.json"]]
    without_room = {a["name"]: a for a in attack_values([run], [10])}
    assert without_room["ig"]["too_large"].endswith("attack-ig.png")
    assert "picture" not in without_room["ig"]
