"""`privacy.grid_bits`: fewer bits make shorter integers, keep the clip and the price, and lose more of the norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation_runs import charged, config, finished, job
from fedveil.deploy.wire_format import packed
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.experiment.certify import certify_config
from fedveil.mechanism.plan import Plan, Released


def of_bits(bits: int | None, view: str = "server", **more: Any) -> Any:
    return config({"name": "dp-fedavg"}, view, privacy={} if bits is None else {"grid_bits": bits}, **more)


@pytest.mark.parametrize("bits", [2, 8, 24])
def test_the_grid_is_as_fine_as_configured_and_the_clip_holds(bits: int, tmp_path: Path) -> None:
    run = job(of_bits(bits), tmp_path)
    door, policy = run.context.door, run.context.policy
    plan = policy.plan(Released(0, run.context.model.vector, None), policy.start())
    assert isinstance(plan, Plan)
    ((_, exponent),) = door.parts.grid(plan)  # type: ignore[arg-type]
    std = run.setting.z * plan.clip  # type: ignore[union-attr]
    assert 2.0**bits <= std * 2.0**-exponent < 2.0 ** (bits + 1)
    vector = torch.ones(door.layout.dimension)
    integers = door.gridded(vector, door.compile(plan))  # type: ignore[arg-type]
    norm = float(np.linalg.norm(integers.astype(float))) * 2.0**exponent
    assert norm <= plan.clip  # type: ignore[union-attr]
    upload = door.upload(vector, plan, 0, 0)
    assert upload.integers is not None
    ((stop, bound),) = door.parts.bounds(plan)  # type: ignore[arg-type]
    assert stop == len(vector)
    assert int(upload.integers.abs().max()) <= bound < 2 ** (bits + 6)
    assert len(packed(upload.integers.numpy(), [(stop, bound)])) == 9 + -(-len(vector) * (2 * bound).bit_length() // 8)


def test_the_price_is_the_same_and_the_model_nearly_so(tmp_path: Path) -> None:
    runs = {bits: job(of_bits(bits), tmp_path / f"{bits}") for bits in (None, 24, 8)}
    ended = {bits: finished(run, Inline(run.context)).model for bits, run in runs.items()}
    events = {bits: [entry.event for entry in charged(tmp_path / f"{bits}")] for bits in runs}
    assert events[None] == events[24] == events[8]
    assert ended[None].equal(ended[24])
    assert not ended[24].equal(ended[8])
    assert float((ended[24] - ended[8]).norm()) < 0.01 * float(ended[24].norm())
    epsilons = {certify_config(of_bits(bits)).proven.epsilon for bits in (None, 2, 8, 24)}
    assert len(epsilons) == 1


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.grid_bits"):
        of_bits(33)
    spaced = {"data": {"partition": {"kind": "iid", "clients": 12}}}
    banded = config({"name": "banded-mf", "separation": 2}, "aggregate", privacy={"grid_bits": 8}, **spaced)
    with pytest.raises(ConfigError, match=r"privacy\.grid_bits = 8: banded-mf has a grid of its own"):
        job(banded, tmp_path / "banded")
    run = job(of_bits(1), tmp_path / "shares")  # an upload's noise adds up with others': at least 4 steps each
    with pytest.raises(ConfigError, match="at least 2 bits"):
        finished(run, Inline(run.context))
