"""Named extras beside the update: what leaves, with which noise, at which price, and what happens when training gives others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from by_hand import Book
from federation_runs import charged, config, finished, job
from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError, UpdateRefused
from fedveil.executors.batched import Batched
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.federation.round import Engine
from fedveil.mechanism.plan import Extra, Plan, Raw, Upload
from fedveil.methods.base import Policy, UploadServer
from fedveil.methods.run_cost import Planner
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.training.local import Local
from fedveil.training.params import Layout

LAYOUT = Layout(("a", "b"), ((3,), (2, 2)))
SHAPES: dict[str, tuple[int, ...]] = {"bit": (), "pair": (2, 3)}
NOISED = {"bit": Extra(0.5, 3.0), "pair": Extra(2.0, 5.0)}
SENT = {"bit": torch.tensor(0.5), "pair": torch.arange(6.0).reshape(2, 3) / 10}


def door(view: View = View.SERVER, shapes: dict[str, tuple[int, ...]] = SHAPES, *, seeded: bool = True) -> Door:
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, view)
    return Door(LAYOUT, scope, "run", Book(), Randomness(1, seeded), extras=shapes)


def entries(d: Door) -> Any:
    assert isinstance(d.ledger, Book)
    return d.ledger.entries


def released(view: View, plan: Plan, extras: Any, update: torch.Tensor | None = None, **how: Any) -> tuple[Upload, Any]:
    """One client's release, or the sum of it and of a client that gives zeros, divided by 2."""
    d = door(view, **how)
    update = torch.ones(7) if update is None else update
    if view is View.SERVER:
        return d.upload(update, plan, 0, 0, extras=extras), entries(d)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    parts = [d.seal(update, plan, 0, 0, extras=extras), d.seal(torch.zeros(7), plan, 1, 0, extras=zeros)]
    return d.release_sum(parts, plan, 0, 2.0), entries(d)


def plan_of(view: View, extras: dict[str, Extra] = NOISED, noise_std: float = 4.0, **more: Any) -> Plan:
    return Plan(clip=1.0, noise_std=noise_std, place="upload" if view is View.SERVER else "sum", extras=extras, **more)


VIEWS = [View.SERVER, View.AGGREGATE]


@pytest.mark.parametrize("view", VIEWS)
def test_extras_leave_in_their_shape_clipped_and_are_charged_jointly(view: View) -> None:
    quiet = {"bit": Extra(0.25, 3e-9), "pair": Extra(0.1, 5e-9)}
    upload, (entry,) = released(view, plan_of(view, quiet, 4e-9), SENT)
    n = 1 if view is View.SERVER else 2
    assert {name: tuple(part.shape) for name, part in upload.extras.items()} == SHAPES
    assert float(upload.extras["bit"]) == pytest.approx(0.25 / n, rel=1e-6)
    expected = SENT["pair"] * 0.1 / float(SENT["pair"].norm()) / n
    torch.testing.assert_close(upload.extras["pair"], expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(upload.vector, torch.ones(7) / math.sqrt(7) / n, rtol=1e-5, atol=1e-7)
    assert isinstance(entry.event, Gaussian)
    assert entry.event.mu == pytest.approx(1e9 * math.hypot(1 / 4, 0.25 / 3, 0.1 / 5))
    assert (entry.coordinates, entry.dimension) == (14, 14)
    assert entry.clip == (1.0, 1.0, 0.25, 0.1)
    assert entry.noise_std == (4e-9, 4e-9, 3e-9, 5e-9)


@pytest.mark.parametrize("view", VIEWS)
def test_each_part_has_its_own_noise(view: View) -> None:
    shapes: dict[str, tuple[int, ...]] = {"pair": (100, 200), "wide": (20_000,)}
    noised = {"pair": Extra(1e-9, 0.7), "wide": Extra(1e-9, 90.0)}
    d, plan = door(view, shapes, seeded=False), plan_of(view, noised)
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
    if view is View.SERVER:
        upload = d.upload(torch.zeros(7), plan, 0, 0, extras=zeros)
    else:
        upload = d.release_sum([d.seal(torch.zeros(7), plan, c, 0, extras=zeros) for c in range(3)], plan, 0, 1.0)
    lo, hi = stats.chi2.ppf([1e-7, 1 - 1e-7], 20_000)
    for name, std in (("pair", 0.7), ("wide", 90.0)):
        values = upload.extras[name].double().flatten().numpy()
        assert lo < float((values**2).sum()) / std**2 < hi
        assert not lo < float((values**2).sum()) / (1.5 * std) ** 2 < hi
        assert stats.kstest(values / std, "norm").pvalue > 1e-6
    one, other = (upload.extras[name].flatten().numpy() for name in ("pair", "wide"))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("extras", "word"),
    [
        ({}, "training gave \\[\\]"),
        ({"bit": torch.tensor(0.5)}, "training gave \\['bit'\\]"),
        ({**SENT, "more": torch.zeros(2)}, "'more'"),
        ({**SENT, "bit": torch.zeros(1)}, "'bit' must be a plain float32 tensor"),
        ({**SENT, "bit": 0.5}, "'bit' must be a plain float32 tensor"),
        ({**SENT, "pair": torch.zeros(2, 3).double()}, "'pair' must be a plain float32 tensor"),
        ({**SENT, "pair": torch.zeros(2, 3).to_sparse()}, "'pair' must be a plain float32 tensor"),
        ({**SENT, "pair": torch.zeros(2, 3, requires_grad=True)}, "'pair' must be a plain float32 tensor"),
        ({**SENT, "pair": torch.full((2, 3), math.nan)}, "NaN"),
        ({**SENT, "pair": torch.full((2, 3), 1e30)}, "max_update_norm"),
        (None, "Local.extras must stay a dictionary, got NoneType"),
        ([1, 2], "Local.extras must stay a dictionary, got list"),
    ],
)
@pytest.mark.parametrize("view", VIEWS)
def test_other_extras_are_a_zero_with_noise_or_refused(view: View, extras: Any, word: str) -> None:
    """The whole release is zero then, update included; without a promise nothing leaves."""
    assert re.search(word, door().problem(torch.ones(7), extras))
    plan = plan_of(view)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    if extras is not None:  # None stands for "no extras" at the door, and a round never asks for it
        bad, rows = released(view, plan, extras)
        honest, same = released(view, plan, zeros, torch.zeros(7))
        assert bad.integers is not None
        assert honest.integers is not None
        assert torch.equal(bad.integers, honest.integers)
        assert rows == same
        with pytest.raises(UpdateRefused, match=word):
            released(view, plan_of(view, {name: replace(e, noise_std=0.0) for name, e in NOISED.items()}), extras)


@pytest.mark.parametrize("extras", [{}, {"bit": Extra(0.5, 3.0)}, {**NOISED, "more": Extra(1.0, 1.0)}])
@pytest.mark.parametrize("raw", [False, True])
def test_a_plan_must_speak_of_each_extra(extras: dict[str, Extra], raw: bool) -> None:
    plan: Any = plan_of(View.SERVER, extras)
    if raw:
        made = plan
        plan = Raw(("update",), lambda _: made, "reads the update")
    d = door()
    with pytest.raises(ConfigError, match=r"the plan must give clip and noise for the extras \['bit', 'pair'\]"):
        d.upload(torch.ones(7), plan, 0, 0, extras=SENT)
    assert entries(d) == []


@pytest.mark.parametrize("view", VIEWS)
def test_an_extra_without_noise_proves_nothing_and_says_so(view: View) -> None:
    bare = {"bit": Extra(0.5, 0.0), "pair": Extra(0.1, 5.0)}
    upload, (entry,) = released(view, plan_of(view, bare), SENT)
    assert entry.event == Unbounded("the extra 'bit' leaves without noise")
    n = 1 if view is View.SERVER else 2
    assert float(upload.extras["bit"]) == pytest.approx(0.5 / n)
    assert upload.integers is None
    assert tuple(upload.vector.shape) == (7,)
    assert float((upload.extras["pair"] * n).std()) > 1


@pytest.mark.parametrize("view", VIEWS)
def test_where_nothing_is_promised_extras_leave_as_floats(view: View) -> None:
    bare = {"bit": Extra(9.0, 0.0), "pair": Extra(9.0, 0.0)}
    plan = Plan(extras=bare, place="upload" if view is View.SERVER else "sum")
    upload, (entry,) = released(view, plan, SENT)
    n = 1 if view is View.SERVER else 2
    assert isinstance(entry.event, Unbounded)
    assert torch.equal(upload.vector, torch.ones(7) / n)
    assert all(torch.equal(upload.extras[name], SENT[name] / n) for name in SHAPES)


# --- through the engines -------------------------------------------------------------------------------------------------

ENGINES: dict[str, Callable[[Any], Engine]] = {
    "inline": Inline,
    "pool": lambda context: ProcessPool(context, 2),
    "batched": lambda context: Batched(context, 2),
}


class Known:
    """Training whose extras follow from client and round alone."""

    def begin(self, local: Local) -> None:
        pass

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(())

    def finish(self, local: Local) -> torch.Tensor:
        local.extras["bit"] = torch.tensor(0.01 * (1 + local.client))
        local.extras["pair"] = torch.full((2, 3), 0.001 * (1 + local.client)) * (1 + local.round)
        return torch.full_like(local.start, 1e-3 * (1 + local.client))


class Seen(UploadServer, Policy):
    """A policy that keeps the extras that it observes, and a method that keeps those that the server gets."""

    def __init__(self, plan: Plan, method: Any = None) -> None:
        self.always, self.method, self.uploads = plan, method, []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.method, name)

    def start(self, s: Any) -> dict[str, Any]:
        return {"bits": torch.zeros(0)}

    def plan(self, s: Any, seen: Any, state: dict[str, Any]) -> Plan:
        return self.always

    def observe(self, s: Any, state: dict[str, Any], upload: Upload) -> dict[str, Any]:
        return {"bits": torch.cat([state["bits"], upload.extras["bit"].reshape(1)])}

    def server(self, s: Any) -> UploadServer:
        return self

    def step(self, s: Any, state: dict[str, Any], uploads: Any) -> tuple[dict[str, Any], torch.Tensor]:
        self.uploads += [(u.round, u.client, {k: v.clone() for k, v in u.extras.items()}) for u in uploads]
        return state, torch.zeros_like(uploads[0].vector)


@pytest.mark.few(4)
@pytest.mark.parametrize("promise", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.heavy
def test_extras_travel_through_every_engine(view: str, engine: str, promise: bool, tmp_path: Path) -> None:
    std = 1e-7 if promise else 0.0
    extras = {"bit": Extra(1.0, std), "pair": Extra(1.0, std)}
    configuration = config({"name": "dp-fedavg"}, view, privacy={"epsilon": None, "noise_multiplier": 1e-9})
    run = job(configuration, tmp_path)
    plan = replace(run.context.policy.part.always, clip=1.0, noise_std=std, extras=extras)  # type: ignore[attr-defined]
    door = replace(run.context.door, extras=SHAPES)
    door.ledger.budgets = None  # type: ignore[attr-defined]
    policy = Planner.of(Seen(plan), run.setting)
    method = Seen(plan, run.method)
    context = replace(run.context, policy=policy, objective=Known(), door=door)  # type: ignore[arg-type]
    run = replace(run, method=method, context=context)  # type: ignore[arg-type]
    progress = finished(run, ENGINES[engine](run.context))
    assert not any(row["failures"] for row in progress.history)
    assert len(method.uploads) == (12 if view == "server" else 3)
    for t, client, values in method.uploads:
        if view == "server":
            bit, pair = 0.01 * (1 + client), 0.001 * (1 + client) * (1 + t)
            assert float(values["bit"]) == pytest.approx(bit, abs=1e-5)
            torch.testing.assert_close(values["pair"], torch.full((2, 3), pair), rtol=0, atol=1e-5)
        else:
            ratio = float(values["pair"].mean()) / float(values["bit"])
            assert ratio == pytest.approx(0.1 * (1 + t), rel=1e-3)
    if view == "server":
        for client, state in progress.policies.items():
            assert state["bits"].tolist() == pytest.approx([0.01 * (1 + client)] * progress.seen[client], abs=1e-5)
    else:
        assert len(progress.common["bits"]) == 3
    assert {e.dimension for e in charged(tmp_path)} == {run.setting.layout.dimension + 7}
