"""The engines by name, and where each of them trains."""

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


def place(name: str, timeout: float | None = None) -> str:
    """The device on which the engine called `name` wants model and examples.

    `auto` takes a GPU that works; one that does not is told of on the log.

    Raises:
        ConfigError: an unknown engine, one that cannot do with a time-out or where this process is, or `cuda` without a GPU
            that works.
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
    """The engine called `name`, for a context whose model is where `place` said.

    `auto` is `cuda` when the model is on a GPU, else the pool when there is more than one core and more than one client, and
    this process may start others. So are `OTHER_ENGINES`: a run itself reaches its clients through them, and what is computed
    of it afterwards needs no messages. `stacked` uses the pool likewise.

    Args:
        timeout: seconds after which a client is given up, or None; needs the pool, because a process cannot leave itself.
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


def settled(name: str, model: FlatModel, objective: Client, s: Setting, timeout: float | None = None) -> str:
    """The engine that a new run records where `name` is `auto`: `stacked` for many small clients, whose bits are other ones.

    A run that is resumed goes on with what it recorded.
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
