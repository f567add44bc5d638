"""The units of systemd, the image, and the bill of materials."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.deploy.commands import join_app, serve_app

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "examples" / "systemd").glob("*.service"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_exposes_little(unit: Path) -> None:
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager"]
    done = subprocess.run([*words, "--threshold=20", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-300:]
    wrong = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True).stderr
    assert [line for line in wrong.splitlines() if unit.name in line and "is not executable" not in line] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_a_unit_runs_is_a_command_with_these_options(unit: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(unit.read_text())
    _, command, *words = parser["Service"]["ExecStart"].split()
    typers = {"serve": serve_app, "join": join_app}
    helped = CliRunner().invoke(typers[command], ["--help"], env={"COLUMNS": "200"}).output
    assert [word for word in words if word.startswith("--") and word not in helped] == []
    assert parser["Service"]["Type"] == "notify"


def test_the_image_has_a_fixed_user_and_a_health_check() -> None:
    text = (ROOT / "Containerfile").read_text()
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .* CMD fedveil net status --dir ", text, re.MULTILINE)
    assert "openssh-client" in text


def test_the_bill_of_materials_names_what_is_installed() -> None:
    bill = json.loads(CliRunner().invoke(app, ["doctor", "--sbom"]).output)
    parts = {part["name"]: part for part in bill["components"]}
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "fedveil")
    assert parts["numpy"]["purl"] == f"pkg:pypi/numpy@{parts['numpy']['version']}"
    assert len(parts["numpy"]["properties"][0]["value"]) == 64
    assert {"python", "cryptography", "typer"} <= parts.keys()
    assert len({part["bom-ref"] for part in bill["components"]}) == len(bill["components"])
