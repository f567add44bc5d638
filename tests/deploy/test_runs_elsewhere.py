"""Runs whose clients' data are not on this machine: what needs them says so in one line, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from federation_runs import config
from fedveil.attacks.attack_run import attack
from fedveil.attacks.audit_run import audit_run
from fedveil.attacks.replay import replay
from fedveil.deploy.central_dp import AppRun, matching_configuration
from fedveil.errors import ConfigError
from fedveil.experiment.config_files import read_config
from joined_clients import Machines, consent, served
from method_kit import layout


def test_a_run_of_a_flower_app_has_no_data_to_attack_or_audit(tmp_path: Path) -> None:
    sections = {
        "method": {"name": "dp-fedavg", "clip": 1.0},
        "training": {"rounds": 2, "clients_per_round": 3},
        "privacy": {"delta": 1e-3, "view": "aggregate", "epsilon": 8.0},
    }
    made = matching_configuration(sections, 6, layout({"a": (4,)}))
    AppRun.begin(tmp_path / "run", made, 6, "a page").close()
    said = r"^data\.name = 'flower-app': a run of a Flower app \(CentralDP\), .* data on this machine$"
    with pytest.raises(ConfigError, match=said):
        attack(tmp_path / "run", "ig")
    with pytest.raises(ConfigError, match=said):
        audit_run(tmp_path / "run", n=20)
    with pytest.raises(ConfigError, match=said):
        replay(read_config(tmp_path / "run/config.toml"))
    assert read_config(tmp_path / "run/config.toml").method == made.method


def test_a_run_over_several_machines_is_audited_and_its_configuration_attacked(tmp_path: Path) -> None:
    three = {"data": {"partition": {"kind": "iid", "clients": 3}}, "training": {"clients_per_round": 3, "rounds": 1}}
    machines = Machines(tmp_path / "clients", {number: consent(number) for number in range(3)})
    served(config({"name": "dp-fedavg"}, "server", **three), tmp_path / "run", machines)
    said = rf"^{tmp_path}/run is a run over several machines, .* give {tmp_path}/run/config.toml if this machine has the data"
    with pytest.raises(ConfigError, match=said):
        attack(tmp_path / "run", "labels")
    with pytest.raises(ConfigError, match=said):
        audit_run(tmp_path / "run", n=20, canaries=2)
    assert any(view.audits for view in audit_run(tmp_path / "run", n=20).views)
    assert attack(tmp_path / "run/config.toml", "labels", out=tmp_path / "attacks").files


def test_a_folder_in_the_place_of_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{tmp_path} is a folder, and a configuration is wanted here: give a TOML file$"):
        read_config(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=rf"wanted here: give {tmp_path}/config\.toml$"):
        read_config(tmp_path)
