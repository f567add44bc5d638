"""A statement made again from configuration and data card: every number and text counts, and other versions are told apart."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedveil.data.load import load
from fedveil.data.partition import Partition, from_options
from fedveil.data.partition_options import Iid
from fedveil.experiment.assembly import Prepared
from fedveil.experiment.config import configure
from fedveil.experiment.recertify import _of_card, differences, recertify
from fedveil.experiment.run import run as execute
from fedveil.verify import Finding
from finished_runs import finished

pytestmark = pytest.mark.heavy
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory, tmp_path)


def changed(file: Path, change: Change) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def only(run: Path) -> Finding:
    (finding,) = recertify(run)
    return finding


def test_an_untouched_statement_is_made_again_to_the_digit(run: Path) -> None:
    assert only(run).kind == "verified"


NUMBERS: dict[str, Change] = {
    "views[1].proven.epsilon": lambda s: s["views"][1]["proven"].update(epsilon=s["views"][1]["proven"]["epsilon"] * (1 + 2e-9)),
    "views[0].proven.epsilon": lambda s: s["views"][0]["proven"].update(epsilon=3.0),
    "views[1].tpr": lambda s: s["views"][1].update(tpr=0.06),
    "views[1].mu": lambda s: s["views"][1].update(mu=0.1),
    "views[1].seen_count": lambda s: s["views"][1].update(seen_count=None),
    "views[1].claimed": lambda s: s["views"][1].update(claimed=s["views"][1]["proven"]),
    "views[1].releases[0].noise_multiplier": lambda s: s["views"][1]["releases"][0].update(noise_multiplier=9.0),
    "noise_multiplier": lambda s: s.update(noise_multiplier=9.0),
    "not_protected": lambda s: s.update(not_protected=[]),
    "in_words": lambda s: s.update(in_words="Perfectly private."),
    "units": lambda s: s.update(units=True),
    "scope.adjacency": lambda s: s["scope"].update(adjacency="replace_one"),
    "assumptions": lambda s: s.pop("assumptions"),
    "approved": lambda s: s.update(approved="by everybody"),
}


@pytest.mark.parametrize("place", NUMBERS)
def test_each_forged_entry_is_contradicted_by_name(place: str, run: Path) -> None:
    changed(run / "statement.json", NUMBERS[place])
    found = only(run)
    assert found.kind == "contradicted"
    assert f"{place}: " in found.text


def test_the_last_digits_are_free(run: Path) -> None:
    changed(
        run / "statement.json", lambda s: s["views"][1]["proven"].update(epsilon=s["views"][1]["proven"]["epsilon"] * (1 + 1e-12))
    )
    assert only(run).kind == "verified"


def test_the_text_for_people_counts_too(run: Path) -> None:
    (run / "statement.md").write_text("# Perfectly private\n")
    assert (only(run).kind, only(run).text) == ("contradicted", "statement.md: another text")


def test_another_version_is_named_and_contradicts_nothing(run: Path) -> None:
    changed(run / "versions.json", lambda v: v.update(fedveil="9.9"))
    assert only(run).kind == "verified", "the same numbers are right whoever computed them"
    changed(run / "statement.json", NUMBERS["views[1].tpr"])
    found = only(run)
    assert found.kind == "unknown"
    assert "made by fedveil 9.9, here " in found.text
    assert "views[1].tpr: expected " in found.text


def test_a_card_of_more_clients_than_configured_is_contradicted(run: Path) -> None:
    changed(run / "data.json", lambda card: card.update(clients=1000))
    found = only(run)
    assert found.kind == "contradicted"
    assert "data.json: clients: expected 12, found 1000" in found.text


def test_a_card_of_clients_that_the_data_do_not_name_is_contradicted(run: Path) -> None:
    changed(run / "data.json", lambda card: card.update(named_clients=500))
    found = only(run)
    assert found.kind == "contradicted"
    assert "data.json: named_clients: expected 0, found 500" in found.text


def test_a_card_of_more_examples_than_there_are_is_contradicted(run: Path) -> None:
    """DP-SGD divides by them: a batch of 16 among 14,400 records costs epsilon = 0.106 where one among 240 costs 4.74."""
    changed(run / "data.json", lambda card: card.update(nominal_examples_per_client=60 * card["nominal_examples_per_client"]))
    found = only(run)
    assert found.kind == "contradicted"
    assert "data.json: nominal_examples_per_client: expected at most " in found.text


def forged(folder: Path, monkeypatch: pytest.MonkeyPatch, by_hand: Partition | None = None, **data: Any) -> Finding:
    """Of a run of DP-SGD that told its own statement and card of 12 times the examples that its clients have."""
    honest = Prepared.population.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Prepared, "population", property(lambda p: replace(honest(p), records=12 * honest(p).records)))
    training = {"rounds": 1, "local": "dp-sgd", "batch_size": 5, "local_steps": 2, "example_clip": 1.0}
    privacy = {"unit": "record", "view": "server", "delta": 1e-5, "noise_multiplier": 1.0}
    config = configure(data={"name": "digits", **data}, model="linear", method="dp-fedavg", training=training, privacy=privacy)
    execute(config, folder / "forged", partition=by_hand)
    return only(folder / "forged")


def test_a_card_against_its_configuration_is_contradicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = forged(tmp_path, monkeypatch, partition={"kind": "iid", "clients": 10, "examples_per_client": 10})
    assert (found.kind, found.text) == ("contradicted", "data.json: nominal_examples_per_client: expected 10, found 120")


def test_a_card_of_a_partition_by_a_program_is_held_to_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = from_options(Iid(clients=10, examples_per_client=100), load("digits").y_train, seed=0)
    found = forged(tmp_path, monkeypatch, by_hand)
    assert found.kind == "contradicted"
    assert "nominal_examples_per_client: expected at most 144, found 1200" in found.text


def test_what_a_configuration_gives_each_client_counts_without_a_known_size(tmp_path: Path) -> None:
    config = configure(data={"name": "femnist", "partition": {"kind": "iid", "clients": 10, "examples_per_client": 20}})
    card: dict[str, Any] = {"clients": 10, "named_clients": 3550, "train_examples": 9000, "test_examples": 1000}
    card |= {"examples": {"shape": [1, 28, 28]}, "labels": {"classes": 62}}
    assert not list(_of_card(config, card | {"nominal_examples_per_client": 20}))
    (wrong,) = _of_card(config, card | {"nominal_examples_per_client": 900})
    assert wrong == "data.json: nominal_examples_per_client: expected 20, found 900"


def test_features_of_another_network_are_contradicted(run: Path) -> None:
    changed(run / "data.json", lambda card: card["examples"].update(features_of="a network"))
    assert "data.json: features_of: expected '', found 'a network'" in only(run).text


def test_a_warning_taken_out_of_a_simulation_is_missed(run: Path) -> None:
    config = tomllib.loads((run / "config.toml").read_text())
    config["run"]["seeded_noise"] = True
    (run / "config.toml").write_text(tomli_w.dumps(config))
    assert "warnings: expected 1 entries, found 0 entries" in only(run).text


@pytest.mark.parametrize("name", ["data.json", "statement.json", "versions.json"])
@pytest.mark.parametrize("content", ["{", "[]", "null", '"text"', "1"])
def test_nonsense_is_never_verified(name: str, content: str, run: Path) -> None:
    (run / name).write_text(content)
    assert only(run).kind in ("unknown", "contradicted")


def test_values_of_other_types_differ() -> None:
    for stated, again in (
        (True, 1),
        ("inf", 1e300),
        (None, 0),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (1, "1"),
        (float("nan"), 1.0),
    ):
        assert list(differences(stated, again)), (stated, again)
    assert not list(differences({"a": [1, "inf", None]}, {"a": [1.0 + 1e-12, "inf", None]}))
