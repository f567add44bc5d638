"""Client canaries in a run of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fedveil.accounting.types import Audit
from fedveil.adversary.snapshot import uncharged
from fedveil.audit.canary_clients import run_with_canaries
from fedveil.engines.select_engine import engine

if TYPE_CHECKING:
    from fedveil.federation.engine import Engine
    from fedveil.federation.round import Context
    from fedveil.run.assembly import Prepared
    from fedveil.run.experiment import Experiment


def audit_canaries(
    experiment: Experiment, prepared: Prepared, canaries: int, on_step: Callable[[str], None] | None = None
) -> list[Audit]:
    """Train the experiment once with that many of its clients as canaries: estimates for the final and the aggregate view.

    Args:
        canaries: from 2 up to the number of clients; half of them is a fair share in small federations.
        on_step: called after each round.

    Raises:
        ConfigError: see `run_with_canaries`.
    """
    job = uncharged(experiment, prepared, experiment.seed)
    rounds, delta = job.setting.rounds, job.setting.delta

    def make(context: Context) -> Engine:
        return engine(experiment.engine.name, context, experiment.engine.timeout)

    def on_round(round: int) -> None:
        if on_step is not None:
            on_step(f"{canaries} canary clients, round {round} of {rounds}")

    return run_with_canaries(job, make, canaries, np.random.default_rng(experiment.seed), on_round).audits(delta)
