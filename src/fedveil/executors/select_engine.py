"""Selection of an engine by name, and of the device on which it trains."""

from __future__ import annotations

import logging
from multiprocessing import current_process
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError
from fedveil.executors.batched import Batched
from fedveil.executors.device import GPU, gpu_in_machine, gpu_problem
from fedveil.executors.engine_names import OTHER_ENGINES, check_engine
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.executors.stacked_models import obstacle, worthwhile
from fedveil.federation.round import Context, Engine
from fedveil.training.cores import available_cores

if TYPE_CHECKING:
    from fedveil.methods.setting import Setting
    from fedveil.training.local import Client
    from fedveil.training.params import FlatModel

_log = logging.getLogger(__name__)


def device_for(name: str, timeout: float | None = None) -> str:
    """Return the device on which the engine called `name` needs model and examples.

    `auto` uses a working GPU; for a GPU that does not work it logs a warning.

    Raises:
        ConfigError: the engine is unknown, does not support a time-out, or cannot run in this process, or `cuda` has no working
            GPU.
    """
    _check(name, timeout)
    if name not in ("auto", "cuda") or (name == "auto" and timeout is not None):
        return "cpu"
    problem = gpu_problem()
    if not problem:
        return GPU
    if name == "cuda":
        raise ConfigError(f"run.engine = 'cuda', but {problem}: set run.engine to auto, pool, or batched (the same on a CPU)")
    if gpu_in_machine():
        _log.warning("this machine has a GPU, but %s: training on the CPU", problem)
    return "cpu"


def engine(
    name: str,
    context: Context,
    timeout: float | None = None,
    *,
    at_once: int | None = None,
    deterministic: bool = False,
) -> Engine:
    """Return the engine called `name`, for a context whose model is on the device that `place` returned.

    `auto` is `cuda` if the model is on a GPU; else the pool if there are several cores and several clients, and this process may
    start others. `OTHER_ENGINES` are the same: the run itself reaches its clients through them, and later
    computations need no messages. `stacked` uses the pool likewise.

    Args:
        timeout: seconds after which a client is abandoned, or None; needs the pool, because a process cannot interrupt itself.
        at_once, deterministic: see `Batched`.
    """
    _check(name, timeout)
    stacked = name == "stacked"
    if name in ("auto", "stacked") or name in OTHER_ENGINES:
        many = available_cores() > 1 and len(context.clients) > 1 and not current_process().daemon
        on_gpu = context.model.vector.device.type == "cuda"
        name = "cuda" if on_gpu else "pool" if timeout is not None or many else "inline"
    if name == "pool":
        return ProcessPool(context, timeout=timeout, stacked=stacked)
    return Inline(context, stacked=stacked) if name == "inline" else Batched(context, at_once, deterministic)


def engine_to_record(name: str, model: FlatModel, objective: Client, s: Setting, timeout: float | None = None) -> str:
    """Return the engine that a new run records for `auto`: `stacked` for many small clients, though its bits differ.

    A resumed run keeps the engine that it recorded.
    """
    if name != "auto" or timeout is not None or not worthwhile(model, s.local, s.cohort) or s.example_clip is not None:
        return name
    return name if obstacle(model, s.local, objective, s.task) else "stacked"


def _check(name: str, timeout: float | None) -> None:
    check_engine(name, timeout)
    if ((timeout is not None and name not in OTHER_ENGINES) or name == "pool") and current_process().daemon:
        raise ConfigError(
            "run.engine = 'pool' and training.client_timeout need worker processes, and a worker of multiprocessing.Pool may not "
            "start any: set run.engine = 'inline' without a time-out, or run it in a process of its own (concurrent.futures)"
        )
