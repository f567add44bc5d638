"""Presets are found by name, through the program as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.experiment.presets import chosen, names, path_of, title
from fedveil.methods.method_registry import METHODS


def test_each_preset_belongs_to_a_method_and_says_what_it_is() -> None:
    assert len(names()) >= 30
    for name in names():
        assert name.split("/")[0] in (*METHODS, "utility")
        assert len(title(name)) > 20
        assert path_of(name).is_file()


def test_exactly_one_of_file_and_preset() -> None:
    with pytest.raises(ConfigError, match="no configuration: give a file"):
        chosen(None, None)
    with pytest.raises(ConfigError, match="both a configuration file and --preset"):
        chosen(Path("a.toml"), "ladp-fl/cifar10-cnn")
    with pytest.raises(ConfigError, match="near it are ladp-fl/cifar10-cnn"):
        chosen(None, "ladp-fl/cifar10-cn")


def test_the_program_lists_and_certifies_presets() -> None:
    listed = CliRunner().invoke(app, ["methods", "ladp-fl"])
    assert "ladp-fl/cifar10-cnn" in listed.output
    assert "threshold = 0.0" in listed.output
    certified = CliRunner().invoke(app, ["certify", "--preset", "ladp-fl/cifar10-cnn", "--json"])
    assert certified.exit_code == 0
    assert '"inf"' in certified.output
