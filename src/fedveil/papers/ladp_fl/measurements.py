"""The epsilon that LaDP-FL computes from the added noise, summed over the rounds."""

from __future__ import annotations

import math
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.public_setting import setting_of
from fedveil.experiment.recorded_run import read_run
from fedveil.papers.ladp_fl.claim import epsilon_of_noise, sensitivity_theorem2
from fedveil.studies.reproduce.measurements import Measure
from fedveil.studies.reproduce.recipe import Measured


def of_budget(config: Config, run: Path | None, folder: Path) -> Measured:
    """LaDP-FL, equations 17 to 19: q times the sum over the rounds of sqrt(2 ln(1.25/delta)) Delta / sigma.

    Delta = 2 eta E G_c; sigma is the root mean square of the noise over all weights of an upload, from the noise on the round's
    mean. The paper does not state which mean of the layers' variances it uses.

    Raises:
        ConfigError: gradients are not clipped, so Delta is undefined.
    """
    assert run is not None
    s = setting_of(config)
    if s.local.batch_clip is None:
        raise ConfigError("the epsilon of the noise needs the sensitivity 2 eta E G_c: set training.batch_clip")
    reach = sensitivity_theorem2(s.local.optimizer.lr, s.local.epochs, s.local.batch_clip)
    rate = min(1.0, s.local.batch_size / s.known_records)
    total, found = 0.0, []
    for row in read_run(run).history:
        norm = row["noise_norm"]
        assert isinstance(norm, float)
        total += rate * epsilon_of_noise(norm * math.sqrt(s.cohort / s.layout.dimension), reach, s.delta)
        found.append((int(row["round"]) + 1, total))
    return {"epsilon_of_noise": found}


BUDGET_AFTER = Measure("train, then read an epsilon off the noise as LaDP-FL does", True, of_budget)
