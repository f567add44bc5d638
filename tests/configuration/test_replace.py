"""Keys of a finished configuration, changed one at a time: the rest stays, and the whole is checked again."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config


def before(**more: Any) -> Config:
    return fv.configure(
        **{
            "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}},
            "method": fv.DPFedAvg(clip=0.5),
            "training": {"rounds": 3, "optimizer": {"name": "sgd", "lr": 0.2}},
            "privacy": {"epsilon": 8.0, "delta": 1e-3},
            **more,
        }
    )


def test_one_key_and_no_other() -> None:
    config = before()
    changed = fv.replace(config, {"privacy.epsilon": 4.0})
    assert (changed.privacy.epsilon, config.privacy.epsilon) == (4.0, 8.0)
    assert fv.replace(changed, {"privacy.epsilon": 8.0}) == config
    assert changed.model_fields_set == config.model_fields_set, "what was left open stays open"


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("method.clip", 2.0, lambda c: c.method.clip),
        ("training.optimizer.lr", 0.5, lambda c: c.training.optimizer.lr),
        ("task", "binary", lambda c: c.task.name),
        ("model", "linear", lambda c: c.model.name),
        ("data.partition.clients", 7, lambda c: c.data.partition["clients"]),
        ("method", fv.NoisyFedAvg(), lambda c: c.method),
        ("run.seed", 3, lambda c: c.run.seed),
    ],
)
def test_every_kind_of_section(key: str, value: Any, found: Any) -> None:
    assert found(fv.replace(before(), {key: value})) == value


def test_other_keys_of_a_nested_section_stay() -> None:
    changed = fv.replace(before(), {"training.optimizer.lr": 0.5, "training.rounds": 7})
    assert (changed.training.optimizer.name, changed.training.rounds) == ("sgd", 7)


def test_a_module_that_was_handed_over_stays() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = before(model={"module": net, "trainable": ["1.weight"]})
    assert fv.replace(config, {"privacy.epsilon": 4.0}).model.source is net
    changed = fv.replace(config, {"model.trainable": ["1.bias"]})
    assert changed.model.source is net
    assert changed.model.parts.trainable == ("1.bias",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy.epsilom": 4}, r"privacy\.epsilom = 4: unknown key .did you mean 'epsilon'"),
        ({"privasy.epsilon": 4}, r"privasy\.epsilon is no key of a configuration: its sections are data, public, model"),
        ({"privacy.": 4}, r"privacy\. is no key"),
        ({"method.clip": -1}, r"method\.clip = -1 is not possible"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fv.replace(before(), changes)
