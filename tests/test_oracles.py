"""What a change of the code's structure must leave as it is: run directories of version 0.2, and seeded runs to the bit.

`oracles/runs-0.2` was made by version 0.2 (`oracles/make_runs_of_0_2.py`), the digests by `oracles/make_oracles.py`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from federation_runs import small_digits
from fedveil.cli.app import app
from fedveil.release.noise import Randomness
from seeded_digests import ENGINES, ORACLES, audit_numbers, audited, demo_digest, digest, digest_of, machine, seeded_runs

OLD = ORACLES / "runs-0.2"
STATUS = {"dp-sgd-server": 2, "interrupted-server": 2, "noisy-fedavg-final": 2, "own-table": 2}
"""What `verify` cannot tell: runs that go on, and statements that version 0.3 words or counts in another way."""
RUNS = {name: (configuration, data) for name, configuration, data in seeded_runs()}
KEPT: dict[str, Any] = json.loads((ORACLES / "seeded-runs.json").read_text(encoding="utf-8"))
AUDITS: dict[str, Any] = json.loads((ORACLES / "audits.json").read_text(encoding="utf-8"))
pytestmark = pytest.mark.heavy
same_machine = pytest.mark.skipif(machine() != KEPT["machine"], reason="this machine or torch rounds in another way")


def runs() -> list[str]:
    return sorted(path.name for path in OLD.iterdir())


@pytest.fixture
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD / request.param, tmp_path / request.param))


@pytest.mark.few(4)
@pytest.mark.parametrize("old", runs(), indirect=True)
def test_a_run_of_0_2_is_verified_reported_and_left_alone(old: Path, tmp_path: Path) -> None:
    before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(old.rglob("*")) if path.is_file()}
    verified = CliRunner().invoke(app, ["verify", str(old), "--json"])
    findings = json.loads(verified.stdout)["findings"]
    assert verified.exit_code == 2, "0.3 says the same in other words, and cannot tell those of 0.2"
    assert not [f for f in findings if f["kind"] == "contradicted"]
    unknown = {f["subject"] for f in findings if f["kind"] == "unknown"}
    assert old.name in STATUS or unknown == {"statement made again"}
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(old), "--out", str(page)]).exit_code == 0
    proven = json.loads((old / "statement.json").read_text(encoding="utf-8"))["views"][1]["proven"]["epsilon"]
    assert page.stat().st_size > 10_000
    assert proven is not None
    assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(old.rglob("*")) if path.is_file()} == before


def test_there_are_ten_kinds() -> None:
    assert len(runs()) == 10


def _fast(name: str, number: int) -> bool:
    return number % 16 == 0 or (number % 3 == 0 and name.startswith(("task", "user")))


def _cases() -> list[Any]:
    named = [name for name in RUNS if name != "model vit-small"]
    fast = {name for number, name in enumerate(named) if _fast(name, number)}
    slow = pytest.mark.slow
    return [
        pytest.param(name, engine, marks=[] if name in fast and engine == "inline" else slow)
        for name in RUNS
        for engine in ENGINES
    ]


@same_machine
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # an error in its place would send clients one by one
@pytest.mark.parametrize(("name", "engine"), _cases())
def test_a_seeded_run_is_the_same_to_the_bit(name: str, engine: str, tmp_path: Path) -> None:
    configuration, data = RUNS[name]
    assert digest(configuration, data, engine, tmp_path / "run") == KEPT[name][engine]


@same_machine
@pytest.mark.slow
def test_the_model_of_the_demo_is_the_same_to_the_bit(tmp_path: Path) -> None:
    assert demo_digest(tmp_path / "demo") == KEPT["demo"]["stacked"]


@same_machine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_audits_of_all_methods_are_the_same() -> None:
    assert {name: audit_numbers(configuration) for name, configuration in audited()} == {
        name: numbers for name, numbers in AUDITS.items() if name != "machine"
    }


@same_machine
def test_one_bit_of_one_example_is_seen(tmp_path: Path) -> None:
    configuration, data = RUNS["fedavg-aggregate"]
    planted = copy.deepcopy(small_digits() if data is None else data)
    pixel = np.unravel_index(int(planted.x_train.argmax()), planted.x_train.shape)
    planted.x_train[pixel] = np.nextafter(planted.x_train[pixel], np.float32(0))
    assert digest(configuration, planted, "inline", tmp_path / "run") != KEPT["fedavg-aggregate"]["inline"]


@same_machine
def test_one_step_of_the_noise_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Randomness.integers

    def planted(self: Randomness, *given: Any, **more: Any) -> Any:
        drawn = right(self, *given, **more)
        drawn[-1] += 1
        return drawn

    monkeypatch.setattr(Randomness, "integers", planted)
    configuration, data = RUNS["dp-fedavg-server"]
    assert digest(configuration, data, "inline", tmp_path / "run") != KEPT["dp-fedavg-server"]["inline"]


@pytest.mark.parametrize("name", ["model.safetensors", "history.csv", "statement.json", "layers.csv"])
def test_one_bit_of_a_file_is_seen(name: str, tmp_path: Path) -> None:
    run = Path(shutil.copytree(OLD / "poisson-aggregate", tmp_path / "run"))
    before, content = digest_of(run), bytearray((run / name).read_bytes())
    content[-5] ^= 1
    (run / name).write_bytes(content)
    assert digest_of(run) != before
