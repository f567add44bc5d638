"""Record and replay: silent on every proven method, loud on bugs that were planted; and what it measures, exactly."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import planted_bugs as bugs
from federation_runs import DEFENCES
from fedveil.attacks import replay as world
from fedveil.attacks import replay_door as doors
from fedveil.attacks.neighbours import CHANGES, changes_for, neighbours
from fedveil.attacks.replay import OTHERS, replay, replay_federation
from fedveil.attacks.replay_door import Measured, not_drawn_by_poisson, power
from fedveil.attacks.replay_record import difference
from fedveil.cli.app import app
from fedveil.errors import FedveilError
from fedveil.methods.adaptive_clipping import AdaptiveClipping
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.method_registry import METHODS
from method_kit import digits, trained

RECORD = {"unit": "record"}
DP_SGD = {"local": "dp-sgd"}
TRAJECTORY = {"batch_clip": 1.0, "local_steps": 3}

PROVEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fedavg", DP_SGD, RECORD),
    ("fedglp-adp", DP_SGD, RECORD),
    ("dp-fedavg", DP_SGD, RECORD),
    ("dp-fedavg", {}, RECORD),
    ("dp-fedavg", {}, {"adjacency": "replace_one"}),
    ("dp-fedavg", {}, {}),
    ("adaptive-clipping", {}, {}),
    ("dp-scaffold", {}, {}),
    ("dp-fedsam", {}, {}),
    ("time-adaptive", DP_SGD, RECORD),
    ("time-adaptive", {}, {}),
    ("banded-mf", {}, {}),
    ("fedglp-adp", {}, {}),
    ("fedanc", {}, {}),
    ("ladp-fl", {}, {}),
    ("noisy-fedavg", TRAJECTORY, {}),
    ("noisy-fedprox", TRAJECTORY, {}),
    ("aldp-fl", {}, {}),
    ("ldp-fed", {}, {}),
    ("gfl-aldpa", {}, {}),
    ("adap-dp-fl", DP_SGD, RECORD),
    ("nbafl", {}, {}),
    ("time-varying-dp", {}, {}),
    ("dpa-ldp", {}, {}),
    ("sensitive-dp", {}, {}),
    ("adapldp", {}, {}),
    ("blur-lus", {}, {}),
    ("fed-dpa", {}, {}),
    ("fed-addp", {}, {}),
    ("fed-smp", {}, {}),
]


CLIENTS_NOISE = (
    *("fedglp-adp", "fedanc", "ladp-fl", "aldp-fl", "ldp-fed", "gfl-aldpa", "adap-dp-fl", "dpa-ldp", "sensitive-dp"),
    *("blur-lus", "fed-dpa", "fed-addp", "fed-smp"),
)
"""Their papers add noise to each client's upload."""


def usual(name: str, view: str) -> bool:
    """Each method in the view of its paper, DP-FedAvg in both, banded noise also in the final one; the rest is slow."""
    return name in ("dp-fedavg", "banded-mf") or (view == "server") == (name in CLIENTS_NOISE)


def config_of(name: str, view: str, training: dict[str, Any], privacy: dict[str, Any]) -> Any:
    method = {"name": name, **({"pretraining_steps": 20} if name == "fedanc" else {})}
    privacy = {"epsilon": 8.0, "view": view, **privacy}
    return digits(method, clients=24, training={"clients_per_round": 3, **training}, privacy=privacy)


# --- no false alarm ---------------------------------------------------------------------------------------------------


def test_every_method_is_replayed() -> None:
    assert {name for name, _, _ in PROVEN} == set(METHODS) - DEFENCES - {"scaffold"}, "which adds no noise"


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("name", "training", "privacy", "view"),
    [
        pytest.param(*one, view, marks=[pytest.mark.slow] * (not usual(one[0], view)))
        for one in PROVEN
        for view in ("server", "aggregate")
    ],
)
def test_no_proven_method_raises_an_alarm(name: str, training: dict[str, Any], privacy: dict[str, Any], view: str) -> None:
    if (name, view) == ("banded-mf", "server"):
        view = "final"  # its noise is on sums only
    found = replay(config_of(name, view, training, privacy))
    assert found.findings == {}
    compared = {check.check: check.compared for check in found.checks}
    assert compared[doors.SENSITIVITY] > 0
    assert compared[OTHERS] > 0
    assert compared[world.MODELS] == 3 * len(found.worlds)
    assert (doors.POST_PROCESSED in compared) == (training == DP_SGD)


def test_what_is_recorded_is_the_run_itself(tmp_path: Path) -> None:
    notes = world.play(bugs.planted(tmp_path), tmp_path, rounds=3, engine_name="inline").notes
    job = bugs.context(bugs.planted(tmp_path), door=replace(bugs.planted(tmp_path).context.door, ledger=bugs.Book()))
    plain = trained(job)
    models = [note.value for note in notes if note.check == world.MODELS]
    assert models[-1][0].equal(plain.model)
    assert difference(models[-1][3], plain.server) == ""


def test_a_replay_in_which_nobody_holds_anything_says_so() -> None:
    nobody = np.zeros(25, dtype=np.int64)

    def fresh(folder: Path) -> Any:
        job = bugs.planted(folder)
        clients = job.context.clients
        return bugs.context(job, clients=replace(clients, x=clients.x[:0], y=clients.y[:0], offsets=nobody))

    with pytest.raises(FedveilError, match="no client with examples took part"):
        replay_federation(fresh)


def test_dropout_is_the_same_in_both_worlds(tmp_path: Path) -> None:
    """Whoever follows gradients does not seed what layers draw: other masks in the second world looked like a leak."""
    (tmp_path / "dropping_net.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))\n"
    )
    config = digits(
        {"name": "dp-fedavg"}, f"model.name={tmp_path / 'dropping_net.py'}:net", "run.engine=inline", "privacy.epsilon=8"
    )
    assert replay(config).findings == {}


def test_the_pool_is_replayed_as_well() -> None:
    assert replay(config_of("dp-fedavg", "server", {}, {}), rounds=2, engine="pool").findings == {}


# --- planted bugs -----------------------------------------------------------------------------------------------------

IN_SUM: dict[str, Any] = {"view": "aggregate"}
STEPS: dict[str, Any] = {"method": FedAvg(), "training": DP_SGD, "privacy": RECORD}
TELLS = bugs.telling()

CAUGHT: dict[str, tuple[bugs.Vary | None, dict[str, Any], str]] = {
    "noise of the sum added after averaging": (bugs.door(bugs.NoiseOnTheMean), IN_SUM, doors.ADDED),
    "no clip": (bugs.door(bugs.NoClip), {"training": {"optimizer": {"lr": 5.0}}}, doors.CLIPPED),
    "no clip of an extra": (
        lambda job: bugs.context(bugs.door(bugs.NoClipOfExtras)(job), objective=bugs.HugeCount()),
        {"method": AdaptiveClipping()},
        doors.CLIPPED,
    ),
    "no noise on an extra": (bugs.door(bugs.NoNoiseOnExtras), {"method": AdaptiveClipping()}, doors.DRAWN),
    "the same noise in every round": (bugs.same_noise_every_round, {}, doors.DRAWN),
    "noise seeded with data": (bugs.door(bugs.NoiseFromData), {}, doors.NOISE),
    "one client twice in a sum": (bugs.door(bugs.Generous), IN_SUM, doors.ADDED),
    "division by a private size": (lambda job: TELLS(bugs.door(bugs.ByPrivateSize)(job)), IN_SUM, doors.UPLOADS),
    "division by the survivors": (bugs.door(bugs.BySurvivors), IN_SUM, doors.UPLOADS),
    "weights are private counts": (None, {"method": bugs.ByExamples()}, doors.WEIGHTS),
    "weights in a sum are private counts": (None, {**IN_SUM, "method": bugs.ByExamples()}, doors.WEIGHTS),
    "weights from raw losses": (TELLS, {"method": bugs.ByLoss()}, world.MODELS),
    "the aggregate looks at a raw update": (TELLS, {"method": bugs.WithRawUpdate()}, world.MODELS),
    "the server's rate follows the training loss": (
        lambda job: replace(TELLS(job), server=bugs.RateByLoss()),
        IN_SUM,
        world.MODELS,
    ),
    "shuffled batches counted as Poisson": (bugs.shuffled, STEPS, doors.BATCHES),
    "fixed samples counted as Poisson": (bugs.without_budget, IN_SUM, doors.BATCHES),
    "the clip follows raw norms": (
        bugs.own(lambda plan, _: bugs.louder(plan, 1 + math.tanh(bugs.SEEN.get("norm", 0.0)))),
        {},
        doors.PLANS,
    ),
    "the support follows a raw update": (bugs.own(bugs.send_what_moved), {}, doors.PLANS),
    "a private mean is broadcast": (
        bugs.own(lambda plan, _: replace(plan, broadcast={"mean": bugs.SEEN.get("update", torch.zeros(1)).mean()})),
        {},
        doors.PLANS,
    ),
    "early stop on the private loss": (bugs.own(bugs.stop_early), {}, world.END),
    "a plan that counts its calls": (bugs.counting(), {}, world.PURE),
    "a plan at random": (bugs.own(lambda plan, _: bugs.louder(plan, 1 + float(torch.rand(())))), {}, world.PURE),
    "a plan that moves the model": (bugs.own(bugs.move_the_model), {}, world.PURE),
    "a policy that listens as it observes": (bugs.telling(lambda base: bugs.Listening(base, lambda p, _: p)), {}, world.STATES),
    "a public figure that is the raw loss": (bugs.telling(lambda base: bugs.Showing(base, lambda p, _: p)), {}, world.HISTORY),
    "two releases of a large update": (bugs.door(bugs.AsOftenAsNeeded), {"training": {"optimizer": {"lr": 0.6}}}, world.ORDER),
    "participation by loss": (lambda job: replace(TELLS(job), participation=bugs.OnceIfGood()), {}, world.PARTICIPANTS),
    "a door that refuses what is not finite": (bugs.door(bugs.Refusing), {}, doors.UPLOADS),
    "one client's data in the next one's update": (lambda job: bugs.context(job, objective=bugs.Infecting()), {}, OTHERS),
    "steps of DP-SGD by the raw loss": (lambda job: bugs.context(job, objective=bugs.StepsByLoss()), STEPS, doors.POST_PROCESSED),
    "a second gradient in a step of DP-SGD": (lambda job: bugs.context(job, objective=bugs.TwoGradients()), STEPS, world.TRAINED),
}
"""What is changed in which run, and the check that must find it."""

REFUSED: dict[str, tuple[bugs.Vary | None, dict[str, Any], str]] = {
    "noise after averaging, none at the door": (None, {**IN_SUM, "method": bugs.NoiseAfterAveraging()}, "plans cost inf"),
    "releases counted once for all rounds": (None, {"method": bugs.HalfPrice()}, "correct `releases`"),
    "local steps of DP-SGD under-counted": (None, {**STEPS, "method": bugs.OneStepARound()}, "correct `releases`"),
    "an extra without noise": (None, {"method": bugs.BareCount()}, "plans cost inf"),
    "fixed samples charged as Poisson": (bugs.sampled_fixed_charged_as_poisson, IN_SUM, "a GDP filter cannot account for"),
    "clamped shares of noise": (
        bugs.own(lambda plan, _: replace(plan, place="upload", clamp=1.0)),
        {**IN_SUM, "privacy": {"epsilon": 100.0}},
        "clamping noise in shares",
    ),
}
"""What is refused before anything leaves, and in which words."""

HARMLESS: dict[str, tuple[bugs.Vary | None, dict[str, Any]]] = {
    "an objective that edits what it was handed": (lambda job: bugs.context(job, objective=bugs.Meddling()), {}),
    "an objective that fails on certain data": (lambda job: bugs.context(job, objective=bugs.Choosy()), {}),
    "an extra that is not clipped by the objective": (
        lambda job: bugs.context(job, objective=bugs.HugeCount()),
        {"method": AdaptiveClipping()},
    ),
    "a clip for fewer local steps than are taken": (
        None,
        {"method": bugs.FewerSteps(), "training": TRAJECTORY},
    ),
}
"""What the house makes harmless: objectives get copies, a failure leaves as a noised zero, and the door clips."""

SOME = tuple(c for c in CHANGES if c.name in ("no examples", "all targets 0", "an example on which training gives NaN"))


def replayed(vary: bugs.Vary | None, more: dict[str, Any]) -> Any:
    changes = [CHANGES[-1]] if "training" in more and more["training"] == DP_SGD else SOME
    return replay_federation(lambda folder: bugs.planted(folder, vary, **more), changes=changes)


@pytest.mark.few(16)
@pytest.mark.parametrize("bug", CAUGHT)
def test_planted_bugs_are_found(bug: str) -> None:
    vary, more, check = CAUGHT[bug]
    assert check in replayed(vary, more).findings


@pytest.mark.parametrize("bug", REFUSED)
def test_planted_bugs_are_refused_before_anything_leaves(bug: str) -> None:
    vary, more, words = REFUSED[bug]
    with pytest.raises(FedveilError, match=re.escape(words)):
        replayed(vary, more)


@pytest.mark.parametrize("bug", HARMLESS)
def test_what_the_house_makes_harmless_shows_nowhere(bug: str) -> None:
    assert replayed(*HARMLESS[bug]).findings == {}


def test_a_promise_of_nothing_has_nothing_to_replay() -> None:
    with pytest.raises(FedveilError, match="promises nothing here"):
        replay(digits({"name": "fedavg"}, "privacy.view=server"))


# --- what it measures -------------------------------------------------------------------------------------------------


def test_sums_of_squares_are_exact() -> None:
    rng = np.random.default_rng(0)
    for most in (2, 2**27, 2**53, 2**62):
        values = rng.integers(-most, most, 1000)
        assert power(values) == sum(int(v) ** 2 for v in values)
    assert power(np.empty(0, dtype=np.int64)) == 0


def test_a_norm_is_compared_to_the_last_unit() -> None:
    parts = (("a", 0, 2, -2, math.inf), ("b", 2, 3, 0, 7.0))
    exact = Measured(np.array([3 * 4, 4 * 4, 7]), parts, math.sqrt(74), 3)
    assert replace(exact, whole=math.nextafter(exact.whole, 0)).problem()
    assert not replace(exact, whole=math.nextafter(exact.whole, 9)).problem()
    assert replace(exact, integers=np.array([0, 0, 8])).problem() == "b has norm 8, above the declared 7"
    assert not replace(exact, integers=np.array([0, 0, 14]), whole=7.0).problem(2)


def test_batches_of_one_size_are_no_poisson_draws() -> None:
    rng = np.random.default_rng(0)
    drawn = [(100, 0.2, int(n)) for n in rng.binomial(100, 0.2, 200)]
    assert not not_drawn_by_poisson(drawn)
    assert "200 batches of 20 to 20 examples" in not_drawn_by_poisson([(100, 0.2, 20)] * 200)
    assert not not_drawn_by_poisson([(100, 0.2, 20)] * 3), "three equal batches may be chance"
    assert not not_drawn_by_poisson([(100, 1.0, 100)] * 200), "whole batches are what a rate of 1 draws"


def test_differences_name_the_place_and_both_values() -> None:
    a = {"x": [1.0, torch.tensor([1.0, 2.0])], "y": math.nan}
    assert difference(a, {"x": [1.0, torch.tensor([1.0, 2.0])], "y": math.nan}) == ""
    assert difference(a, {"x": [1.0, torch.tensor([1.0, 3.0])], "y": math.nan}) == "x.1: 1 of 2 numbers, at 1 2 against 3"
    assert difference(a, {"x": [1.5, a["x"][1]], "y": 0.0}) == "x.0: 1 against 1.5"
    assert difference({"a": 1}, {"b": 1}) == "['a'] against ['b']"
    assert difference(1, 1.0) == "1 against 1"
    assert "float32 [2] against" in difference(torch.zeros(2), torch.zeros(3))


def test_neighbours_differ_in_one_client_only(tmp_path: Path) -> None:
    job = bugs.planted(tmp_path)
    changes = changes_for(job)
    assert [c.name for c in changes] == [c.name for c in CHANGES if not c.record]
    own = job.context.clients
    for neighbour in neighbours(job, changes, [3, 5]):
        assert neighbour.client in (3, 5)
        for c in range(len(own)):
            same = all(bool(a.equal(b)) for a, b in zip(own.examples(c), neighbour.clients.examples(c), strict=True))
            assert same == (c != neighbour.client), neighbour


def test_dp_sgd_gets_one_record_of_the_same_client(tmp_path: Path) -> None:
    job = bugs.planted(tmp_path, **STEPS)
    assert {c.name for c in changes_for(job)} == {c.name for c in CHANGES if c.record and not c.resizes}, "sizes are public here"


# --- the command ------------------------------------------------------------------------------------------------------

TOML = """
[data]
partition = {kind = "iid", clients = 24}
[model]
name = "linear"
[method]
name = "dp-fedavg"
[training]
clients_per_round = 4
sampling = "fixed"
[privacy]
epsilon = 8.0
delta = 1e-3
"""


def test_the_command_says_what_was_identical_and_ends_with_one_on_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(TOML)
    arguments = ["replay", str(path), "--rounds", "2"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"ledger rows +identical \(14\)", shown.output)
    monkeypatch.setitem(METHODS, "dp-fedavg", bugs.ByExamples)
    found = CliRunner().invoke(app, [*arguments, "--set", "privacy.view=server", "--json"])
    assert found.exit_code == 1
    record = json.loads(found.output)
    (weights,) = (check for check in record["checks"] if check["check"] == doors.WEIGHTS)
    assert not record["passed"]
    assert re.match(r"client \d+: no examples: round \d, client \d+: [\d.]+ against [\d.]+", weights["finding"])
