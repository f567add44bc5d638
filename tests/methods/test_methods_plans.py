"""Plans that adapt read released values alone: a client's data are all replaced, its releases kept, and every plan is the same.

Replay looks for the same in every method, in `tests/adversary`; here the plans must also follow other releases.
"""

from __future__ import annotations

from typing import Any

import pytest

from method_kit import all_same, check_plans_read_only_uploads, digits, swapped_plans

ADAM = {"optimizer": {"name": "adam", "lr": 0.01}}
PUBLIC = {"public_fraction": 0.1}
MLP = 'model={name="mlp", hidden=[12, 12]}'
METHODS: list[tuple[dict[str, Any], float, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"name": "adaptive-clipping"}, 20000.0, {}, {}, ()),
    ({"name": "adapldp"}, 500.0, {}, {}, ()),
    ({"name": "aldp-fl"}, 2000.0, {}, {}, ("data.partition.clients=12", "training.rounds=3")),
    ({"name": "dp-scaffold"}, 8.0, {}, {}, ()),
    ({"name": "fed-smp", "share": 0.2, "mask": "public", "public_steps": 3}, 8.0, {}, PUBLIC, ()),
    ({"name": "fedanc", "pretraining_steps": 20}, 8.0, {}, PUBLIC, ()),
    ({"name": "fedglp-adp", "growth": 0.1}, 20000.0, ADAM, {}, (MLP,)),
    ({"name": "ladp-fl", "bound": 1.0, "spread": 20.0}, 2000.0, {}, {}, ()),
    ({"name": "sensitive-dp"}, 500.0, {}, {}, ()),
    ({"name": "time-varying-dp", "refine_every": 1, "refinement": 0.5}, 8.0, {}, {"public_fraction": 0.2}, ()),
]
"""With epsilon, what else of `training` and `data`, and overrides."""
CASES = [
    pytest.param(*case, view, id=f"{case[0]['name']}-{view}", marks=[pytest.mark.slow] * (number % 2 == (view == "server")))
    for number, case in enumerate(METHODS)
    for view in ("server", "aggregate")
    if case[0]["name"] != "time-varying-dp" or view == "aggregate"
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("method", "epsilon", "training", "data", "overrides", "view"), CASES)
def test_plans_follow_releases_alone(
    method: dict[str, Any],
    epsilon: float,
    training: dict[str, Any],
    data: dict[str, Any],
    overrides: tuple[str, ...],
    view: str,
) -> None:
    sections = {"training": {"clients_per_round": None, **training}, "data": data, "privacy": {"epsilon": epsilon, "view": view}}
    check_plans_read_only_uploads(digits(method, *overrides, clients=6, rounds=4, **sections))


def test_the_published_variant_of_ladp_fl_is_found() -> None:
    options = {"name": "ladp-fl", "variant": "published", "bound": 1e-2, "spread": 100.0}
    training = {"clients_per_round": 12, "batch_clip": 1.0}
    config = digits(options, privacy={"epsilon": 2000.0, "view": "server"}, training=training)
    assert not all_same(swapped_plans(config))
