"""Jobs of NVFlare in its simulator: two sites, one server, offline, in a process of their own."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
TOTAL = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-3, "rounds": 2, "clients": 12}
"""Numbers of the filter in the tests."""
_JOB = """
import json, sys
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from flare_pieces import Received, Trainer

folder, options = sys.argv[1], json.loads(sys.argv[2])
job = FedJob(name="tests", min_clients=2)
job.to_server(NPModelPersistor(model=[[100.0] * 50] * 2), id="persistor")
{controller}
job.to_server(Received(folder + "/received"), id="received")
job.to_clients(Trainer(**options["trainer"]), tasks=["*"])
{more}
job.export_job(folder + "/job")
sys.exit(job.simulator_run(folder + "/work", n_clients=2, threads=2))
"""
_FEDAVG = "job.to_server(FedAvg(num_clients=2, num_rounds=options['rounds'], ignore_result_error=True))"


@dataclass(frozen=True)
class Finished:
    """A finished job.

    Args:
        status: exit status of the simulator. log: what it printed. received: what the server received, in no order.
        folder: with the folders job, work and ledger.
    """

    status: int
    log: str
    received: list[dict[str, Any]]
    folder: Path

    def weights(self) -> list[Any]:
        """Arrays that the server received."""
        return [one["body"]["DXO"]["data"]["numpy_key"] for one in self.received if "DXO" in one["body"]]


def ran(folder: Path, more: str, *, rounds: int = 2, controller: str = _FEDAVG, **trainer: Any) -> Finished:
    """Run a job with the lines `more`, in which `total` are arguments of the filter.

    Args:
        controller: lines that add the workflow. trainer: arguments of `Trainer`.
    """
    (folder / "received").mkdir()
    total = f"total = dict({TOTAL!r}, ledger=folder + '/ledger')"
    script = folder / "job.py"
    script.write_text(_JOB.format(more=f"{total}\n{more}", controller=controller))
    options = json.dumps({"rounds": rounds, "trainer": trainer})
    status, log = run_script(script, str(folder), options)
    files = (folder / "received").iterdir()
    return Finished(status, log, [pickle.loads(file.read_bytes()) for file in files], folder)


def run_script(script: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a program that runs a job."""
    paths = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, check=False, timeout=280)
    return done.returncode, done.stdout + done.stderr
