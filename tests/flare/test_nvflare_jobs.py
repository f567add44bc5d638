"""Jobs with fedveil in NVFlare's simulator. The tests look at what the server received, since the simulator exits with 0 even
where every result was refused."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare (pip install 'fedveil[nvflare]')")

import fedveil as fv
from flare_jobs import TOTAL, Finished, ran, run_script

EXAMPLES = Path(__file__).parents[2] / "examples" / "nvflare"
FILTER = """
from fedveil.deploy.nvflare import ReleaseFilter
job.to_clients(ReleaseFilter(**total), filter_type=FilterType.TASK_RESULT)
"""
EVERY_TASK = """
from fedveil.deploy.nvflare import ReleaseFilter
job._deploy_map["@ALL"].add_task_result_filter(["*"], ReleaseFilter(**total))
"""
NOISE = 100.0
"""More than any noise of these tests, and less than the trainer's step."""


def rows(ledger: Path) -> int:
    """Number of releases that a ledger holds."""
    head = ledger.with_name(f"{ledger.name}-head")
    return int(head.read_text().split()[3]) if head.exists() else 0


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A job of three rounds, one more than its filter is for."""
    return ran(tmp_path_factory.mktemp("honest"), FILTER, rounds=3)


@pytest.mark.heavy
def test_the_server_receives_releases_and_nothing_else(honest: Finished) -> None:
    assert sorted(one["site"] for one in honest.received) == ["site-1"] * 3 + ["site-2"] * 3
    for one in honest.received:
        assert "1234.5" not in str(one)
        assert one["rc"] == "OK" or not one["body"]
        assert one["rc"] != "OK" or one["body"]["DXO"]["meta"] == {"NUM_STEPS_CURRENT_ROUND": 1}
    assert len(honest.weights()) == 4
    for array in honest.weights():
        assert 0 < np.abs(array - 100).max() < NOISE, "training moved each number by 1000, in place"
        assert (array.shape, array.dtype) == ((2, 50), np.float32)


@pytest.mark.heavy
def test_each_site_has_a_ledger_and_a_statement_and_its_lifetime_ends(honest: Finished) -> None:
    assert [one["rc"] for one in honest.received].count("TASK_RESULT_FILTER_ERROR") == 2
    for site in ("site-1", "site-2"):
        ledger = honest.folder / "ledger" / f"{site}.ledger"
        assert rows(ledger) == TOTAL["rounds"]
        assert fv.verification(ledger).outcome == "verified"
        assert "epsilon = 8" in ledger.with_suffix(".md").read_text()


@pytest.mark.heavy
def test_no_source_of_fedveil_is_sent_with_the_job(honest: Finished) -> None:
    assert not list((honest.folder / "work").glob("**/custom/fedveil"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["more", "failed", "raises"])
def test_a_refused_result_and_a_failed_one_leave_an_error_code_alone(how: str, tmp_path: Path) -> None:
    done = ran(tmp_path, FILTER, rounds=1, how=how)
    assert len(done.received) == 2
    assert all(not one["body"] and one["rc"] != "OK" for one in done.received)
    assert "1234.5" not in str(done.received)
    assert rows(tmp_path / "ledger" / "site-1.ledger") == 0


@pytest.mark.slow
def test_differences_leave_as_noisy_differences(tmp_path: Path) -> None:
    done = ran(tmp_path, FILTER, how="difference")
    assert len(done.weights()) == 4
    assert all(0 < np.abs(array).max() < NOISE for array in done.weights())


@pytest.mark.slow
def test_without_the_filter_the_server_receives_everything(tmp_path: Path) -> None:
    done = ran(tmp_path, "", rounds=1)
    assert [one["body"]["secret"] for one in done.received] == [1234.5] * 2
    assert all((array == 1100).all() for array in done.weights())


@pytest.mark.slow
def test_a_filter_for_every_task_ends_the_job_before_a_result_leaves(tmp_path: Path) -> None:
    done = ran(tmp_path, EVERY_TASK, rounds=1)
    assert not done.weights()
    assert "name each" in done.log


_WITHOUT_CODE = """
import json, os, sys
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.app_common.np.np_trainer import NPTrainer
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe import SimEnv
from fedveil.deploy.nvflare import ReleaseFilter

folder = sys.argv[1]
job = FedJob(name="tests", min_clients=2)
job.to_server(NPModelPersistor(model=[[100.0] * 50] * 2), id="persistor")
job.to_server(FedAvg(num_clients=2, num_rounds=1))
job.to_clients(NPTrainer(delta=1000), tasks=["train"])
job.to_clients(ReleaseFilter(**json.loads(sys.argv[2])), filter_type=FilterType.TASK_RESULT)
SimEnv(num_clients=2, workspace_root=folder).deploy(job)
"""


@pytest.mark.slow
@pytest.mark.parametrize("listed", [True, False])
def test_a_job_without_code_needs_the_entry_in_the_class_allow_list(listed: bool, tmp_path: Path) -> None:
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

    local = tmp_path / "tests" / "local"
    local.mkdir(parents=True)
    allowed = [*DEFAULT_CLASS_ALLOW_LIST, *["fedveil.deploy.nvflare."] * listed]
    (local / "resources.json").write_text(json.dumps({"format_version": 2, "class_allow_list": allowed}))
    (tmp_path / "job.py").write_text(_WITHOUT_CODE)
    numbers = json.dumps({**TOTAL, "ledger": str(tmp_path / "ledger")})
    status, log = run_script(tmp_path / "job.py", str(tmp_path), numbers)
    models = list(tmp_path.glob("tests/server/**/server.npy"))
    if not listed:
        assert "is not in allow_list" in log
        assert not models
        return
    assert status == 0
    (model,) = models
    assert np.abs(np.load(model) - 100).max() < NOISE
    assert rows(tmp_path / "ledger" / "site-1.ledger") == 1


AGGREGATOR = """
from fedveil.deploy.nvflare import NoisyAggregator
job.set_app_packages(["fedveil"])
noisy = NoisyAggregator(clip=1.0, epsilon=8.0, delta=1e-3, rounds=2, clients=4, out=folder + "/run")
job.to_server(FedAvg(num_clients=2, num_rounds=options["rounds"], aggregator=noisy))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "how"), [(1, "weights"), (2, "difference"), (3, "weights")])
def test_noise_on_the_sum_leaves_a_run_that_verifies(rounds: int, how: str, tmp_path: Path) -> None:
    done = ran(tmp_path, "", rounds=rounds, controller=AGGREGATOR, how=how)
    assert (rounds > 2) is (done.status != 0), "a round beyond those that the noise is for ends the job"
    assert fv.verification(tmp_path / "run").outcome == "verified"
    assert rows(tmp_path / "run" / "ledger.sqlite") == min(rounds, 2)
    (model,) = (tmp_path / "work").glob("server/**/server.npy")
    assert 0 < np.abs(np.load(model) - 100).max() < NOISE


PRIVATE = ["noise_at_the_sites", "noise_on_the_sum"]


@pytest.mark.parametrize("name", PRIVATE)
def test_at_most_five_lines_of_a_job_after_hello_pt_change(name: str) -> None:
    before, after = ((EXAMPLES / f"{one}.py").read_text().splitlines() for one in ("plain", name))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert sum(line[0] == "+" for line in changes) <= 5
    assert sum(line[0] == "-" for line in changes) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
def test_the_examples_run_with_tensors(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "NVFLARE_SIMULATOR_WORKSPACE_ROOT": str(tmp_path / "work")}
    command = [sys.executable, f"{name}.py"]
    done = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    if name == "noise_on_the_sum":
        assert fv.verification(tmp_path / "nvflare-run").outcome == "verified"
        return
    for site in ("site-1", "site-2"):
        assert rows(tmp_path / "nvflare-ledgers" / f"{site}.ledger") == 3
