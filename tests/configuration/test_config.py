"""Configuration: what is refused and how, what the setting says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedveil.accounting.accountant import bound
from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.experiment.config import configure, parse
from fedveil.experiment.config_files import load_config
from fedveil.experiment.public_setting import calibrated_setting, setting_of
from fedveil.methods.fedavg import DPFedAvg, FedAvg

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"training": {"roundz": 3}}, ["training.roundz = 3", "unknown key", "'rounds'"]),
        ({"trainning": {}}, ["trainning", "unknown key", "'training'"]),
        ({"training": {"rounds": 0}}, ["training.rounds = 0", "greater than or equal to 1"]),
        ({"training": {"optimizer": {"name": "sdg"}}}, ["training.optimizer.name = 'sdg'", "'sgd'"]),
        ({"training": {"optimizer": {"lrr": 1}}}, ["training.optimizer.lrr", "'lr'"]),
        ({"privacy": {"delta": 2.0}}, ["privacy.delta = 2.0", "less than 1"]),
        ({"privacy": {"view": "servr"}}, ["privacy.view = 'servr'", "'server'"]),
        ({"data": {"client_test_fraction": 1.5}}, ["data.client_test_fraction = 1.5"]),
    ],
)
def test_unknown_keys_and_impossible_values_name_key_value_and_remedy(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(section)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"method": {"name": "dp-fedavgg"}}, ["dp-fedavgg", "'dp-fedavg'"]),
        ({"method": {"name": "dp-fedavg", "clipp": 1}}, ["method.clipp", "'clip'"]),
        ({"method": {"name": "dp-fedavg", "clip": -1}}, ["method.clip = -1", "greater than 0"]),
        ({"data": {"name": "digitz"}}, ["digitz", "'digits'"]),
        ({"data": {"partition": {"kind": "dirichlett", "clients": 3}}}, ["dirichlett", "'dirichlet'"]),
        ({"model": {"name": "lenet"}}, ["lenet", "lenet5"]),
        ({"model": {"name": "mlp", "width": 3}}, ["width"]),
        ({"training": {"clients_per_round": 99}}, ["clients_per_round = 99", "10 clients"]),
        ({"privacy": {"epsilon": 1.0, "noise_multiplier": 1.0}}, ["epsilon", "noise_multiplier", "both"]),
        ({"method": {"name": "fedavg"}, "privacy": {"epsilon": 1.0}}, ["fedavg", "no noise"]),
        ({"method": {"name": "dp-fedavg"}}, ["epsilon", "noise_multiplier"]),
        ({"privacy": {"epsilon": 8.0, "max_participations": 2}}, ["max_participations = 2", "view = 'server'", "aggregate"]),
        ({"privacy": {"epsilon": 8.0, "max_participations": 2, "view": "final"}}, ["view = 'server'", "final"]),
    ],
)
def test_what_only_the_whole_configuration_can_tell(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        method, setting = calibrated_setting(parse(section))
        method.releases(setting, View.AGGREGATE)
    for word in words:
        assert word in str(caught.value)


def test_an_override_replaces_a_whole_section(tmp_path: Path) -> None:
    config = parse({"method": {"name": "dp-fedavg", "clip": 0.5}}, ['method={name="fedavg"}', "training={rounds=3}"])
    assert config.method == FedAvg()
    assert config.training.rounds == 3
    with pytest.raises(ConfigError, match="whole section"):
        parse({}, ["method=fedavg"])


def test_overrides_and_their_errors(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[training]\nrounds = 3\n[data]\npartition = { kind = "iid", clients = 4 }\n')
    config = load_config(
        file, ["training.rounds=7", "data.partition.clients=5", "method.name=dp-fedavg", 'privacy.view="server"']
    )
    assert (config.training.rounds, config.data.partition["clients"], config.method.name) == (7, 5, "dp-fedavg")
    assert config.privacy.view is View.SERVER
    for bad in ("rounds=3", "training.rounds", "training.=3", "training.rounds.x=3"):
        with pytest.raises(ConfigError, match="--set"):
            load_config(file, [bad])
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.toml")
    file.write_text("[training\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(file)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configurations_calibrate(path: Path) -> None:
    method, setting = calibrated_setting(load_config(path))
    assert setting.layout.dimension > 0
    assert method.releases(setting, setting.scope.view)


def test_epsilon_is_reached_but_not_exceeded_and_half_the_noise_exceeds_it() -> None:
    for view, sampling in (("aggregate", "poisson"), ("aggregate", "fixed"), ("server", "fixed")):
        config = configure(
            data={"partition": {"kind": "iid", "clients": 100}},
            method=DPFedAvg(clip=0.5),
            training={"rounds": 20, "clients_per_round": 20, "sampling": sampling},
            privacy={"epsilon": 4.0, "delta": 1e-4, "view": view},
        )
        method, setting = calibrated_setting(config)
        scope = setting.scope
        spent, _ = bound(method.releases(setting, scope.view), 1e-4, adjacency=scope.adjacency)
        assert 3.99 < spent <= 4.0
        half = setting_of(config).__class__(**{**vars(setting), "noise_multiplier": setting.z / 2})
        assert bound(method.releases(half, scope.view), 1e-4, adjacency=scope.adjacency)[0] > 6.0


def test_sampling_is_poisson_only_where_it_amplifies() -> None:
    base: dict[str, Any] = {"data": {"partition": {"kind": "iid", "clients": 50}}, "training": {"clients_per_round": 5}}
    assert setting_of(parse({**base})).sampling == "fixed"
    private = {"method": {"name": "dp-fedavg"}, "privacy": {"epsilon": 1.0}}
    assert setting_of(parse({**base, **private})).sampling == "poisson"
    private["privacy"]["view"] = "server"  # type: ignore[assignment]
    assert setting_of(parse({**base, **private})).sampling == "fixed"


@pytest.mark.heavy
def test_configuration_needs_no_torch() -> None:
    code = (
        "import sys; from fedveil.experiment.config import parse; "
        "from fedveil.experiment.public_setting import calibrated_setting; "
        "calibrated_setting(parse({'method': {'name': 'dp-fedavg'}, 'privacy': {'epsilon': 1.0}})); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_client_given_up_under_dp_sgd_would_be_seen() -> None:
    config = parse({"training": {"local": "dp-sgd", "client_timeout": 5.0}, "privacy": {"unit": "record"}})
    with pytest.raises(ConfigError, match=r"training.client_timeout = 5 .* leave training.client_timeout out"):
        setting_of(config)


def test_in_python_a_method_a_model_and_a_task_may_be_names() -> None:
    by_name = configure(method="dp-fedavg", model="linear", task="regression")
    assert by_name == configure(method={"name": "dp-fedavg"}, model={"name": "linear"}, task={"name": "regression"})
    assert (by_name.method.name, by_name.model.name, by_name.task.name) == ("dp-fedavg", "linear", "regression")


@pytest.mark.parametrize(
    ("section", "name", "near"),
    [
        ("method", "dp-fedavgg", "dp-fedavg"),
        ("task", "regresion", "regression"),
        ("data", "mnits", "mnist"),
        ("model", "lenet", "lenet5"),
    ],
)
def test_an_unknown_name_is_an_error_when_configured(section: str, name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.name = '{name}'.*did you mean '{near}'"):
        configure(**{section: {"name": name}})
