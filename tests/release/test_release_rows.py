"""What the door writes into the ledger of a release's form: its grid, its mechanism, its extras."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Entry, Ledger
from fedveil.mechanism.mechanisms import Banded, NoiseMemory, Participation
from fedveil.mechanism.plan import DpSgd, Extra, LocalDpSgd, Plan, Raw, UnprovenPlan, Upload
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.training.params import Layout

LAYOUT = Layout(("a", "b"), ((3,), (2, 2)))
UPDATE = torch.linspace(-0.2, 0.3, 7)


def door(folder: Path, view: View = View.SERVER, **more: Any) -> Door:
    path = folder / "ledger.sqlite"
    if not path.exists():
        Ledger.create(path, "run").close()
    ledger = BudgetedLedger(path, None)
    return Door(LAYOUT, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, view), "run", ledger, Randomness(1, False), **more)


def rows(folder: Path) -> list[Entry]:
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        return [entry for _, _, entry in ledger.entries()]


def row_of(folder: Path, plan: Plan | Raw, extras: dict[str, torch.Tensor] | None = None) -> tuple[Entry, Upload]:
    """One upload under the plan, and its row as the ledger on disk has it."""
    made = door(folder, extras={name: tuple(part.shape) for name, part in (extras or {}).items()})
    upload = made.upload(UPDATE, plan, 4, 0, extras=extras)
    (entry,) = rows(folder)
    return entry, upload


@pytest.mark.parametrize("std", [0.75, torch.tensor([0.75, 3.0])])
def test_the_grid_in_the_ledger_reads_what_left(std: Any, tmp_path: Path) -> None:
    """k = floor(log2 std) - 24; the integers times 2^k are the vector."""
    extras = {"within": torch.tensor(0.5), "drift": torch.ones(2)}
    plan = Plan(clip=1.0, noise_std=std, extras={"within": Extra(0.5, 8.0), "drift": Extra(2.0, 0.3)})
    entry, upload = row_of(tmp_path, plan, extras)
    assert entry.grid == (-25, -25 if isinstance(std, float) else -23, -21, -26)
    assert (entry.mechanism, entry.extras, entry.dimension) == ("independent", ("within", "drift"), 10)
    assert len(entry.clip) == len(entry.noise_std) == 4
    assert upload.integers is not None
    steps = np.repeat(2.0 ** np.array(entry.grid), [3, 4, 1, 2])
    left = torch.cat([upload.vector, upload.extras["within"].reshape(1), upload.extras["drift"]])
    assert np.allclose(upload.integers.numpy() * steps, left.numpy(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("plan", "mechanism"),
    [
        (Plan(), "none"),
        (Plan(clip=1.0), "none"),
        (Plan(noise_std=0.5), "independent"),
        (UnprovenPlan(clip=1.0, noise_std=0.5, reason="the noise follows the data"), "independent"),
        (
            Raw(("norm",), lambda update: Plan(clip=1.0, noise_std=float(update.norm())), "the noise follows the norm"),
            "independent",
        ),
        (LocalDpSgd(step=DpSgd(1.0, 1.0, 0.1, 5, 10.0, 60)), "none"),
    ],
)
def test_floats_have_no_grid(plan: Plan | Raw, mechanism: str, tmp_path: Path) -> None:
    entry, upload = row_of(tmp_path, plan)
    assert (entry.grid, entry.mechanism, entry.extras) == (None, mechanism, ())
    assert upload.integers is None


def test_the_row_of_a_banded_release_has_the_digest_of_what_left(tmp_path: Path) -> None:
    mechanism = Banded((1.0, 0.5), 9, Participation(1, 9))
    plan = Plan(clip=1.0, noise_std=2.0, place="sum", mechanism=mechanism)
    made = door(tmp_path, View.AGGREGATE, memory=NoiseMemory())
    uploads = [made.release_sum([made.seal(UPDATE, plan, 0, t)], plan, t, 1) for t in range(3)]
    for entry, upload in zip(rows(tmp_path), uploads, strict=True):
        assert upload.integers is not None
        assert (entry.mechanism, entry.grid) == ("banded", (1 - 30, 1 - 30))
        assert entry.note == f"released sha256 {hashlib.sha256(upload.integers.numpy().tobytes()).hexdigest()}"
