"""Noise of adaptive clips: each round costs the planned mu, not that of noise which was rounded to float32."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedveil.accounting.types import Gaussian
from fedveil.methods.run_cost import run_releases
from method_kit import book, digits, job_of, trained

METHODS: list[dict[str, Any]] = [
    {"name": "aldp-fl", "clip_range": [0.01, 100.0]},
    {"name": "aldp-fl", "clip_range": [0.01, 100.0], "allocation": "equal"},
    {"name": "fedglp-adp", "variant": "proven"},
    {"name": "ladp-fl", "clipping": "whole", "spread": 1000.0},
    {"name": "ladp-fl"},
    {"name": "sensitive-dp", "clip_range": [0.01, 50.0]},
]


@pytest.mark.few(4)
@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join(map(str, m.values())))
def test_the_ledger_holds_no_more_than_the_statement_says(method: dict[str, Any], view: str) -> None:
    """With a given noise multiplier nothing is kept back for rounding: at most a few last digits of float64."""
    privacy = {"noise_multiplier": 0.8, "view": view}
    job = job_of(digits(method, privacy=privacy, training={"clients_per_round": 12}))
    trained(job)
    events = run_releases(job.method, job.setting, job.setting.scope.view)
    stated = math.fsum(e.count * e.mu**2 for e in events if isinstance(e, Gaussian))
    assert stated == pytest.approx(3 / 0.8**2, rel=1e-12)
    for client in {entry.client for entry in book(job).entries}:
        assert book(job).mu2(client) <= stated * (1 + 1e-14)
