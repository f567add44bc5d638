"""What the door writes into the ledger of a release's form: its grid, its mechanism, its extras."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unit, View
from fedveil.errors import LedgerError
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Entry, Ledger
from fedveil.release.banded import Banded
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.release.noise_mechanism import Participation
from fedveil.release.noise_memory import NoiseMemory
from fedveil.release.plan import DpSgd, Extra, Plan, Raw, Upload
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
        (Plan(clip=1.0, noise_std=0.5, unproven="the noise follows the data"), "independent"),
        (
            Raw(("norm",), lambda update: Plan(clip=1.0, noise_std=float(update.norm())), "the noise follows the norm"),
            "independent",
        ),
        (Plan(dp_sgd=DpSgd(1.0, 1.0, 0.1, 5, 10.0, 60)), "none"),
    ],
)
def test_floats_have_no_grid(plan: Plan | Raw, mechanism: str, tmp_path: Path) -> None:
    entry, upload = row_of(tmp_path, plan)
    assert (entry.grid, entry.mechanism, entry.extras) == (None, mechanism, ())
    assert upload.integers is None


BANDED = Plan(clip=1.0, noise_std=2.0, place="sum", mechanism=Banded((1.0, 0.5), math.hypot(1, 0.5), Participation(1, 9)))


def summed(folder: Path, round: int, update: torch.Tensor = UPDATE) -> Upload:
    """One sum of one client by a process that was just started."""
    made = door(folder, View.AGGREGATE, memory=NoiseMemory(folder / "noise-state.safetensors"))
    upload = made.release_sum([made.seal(update, BANDED, 0, round)], BANDED, round, 1)
    assert upload.integers is not None
    return upload


def test_the_row_of_a_banded_release_has_the_digest_of_what_left(tmp_path: Path) -> None:
    uploads = [summed(tmp_path, t) for t in range(3)]
    entries = rows(tmp_path)
    assert [entry.mechanism for entry in entries] == ["banded"] * 3
    assert [entry.event for entry in entries] == [Gaussian(0.5 * math.hypot(1, 0.5)), Gaussian(0.0), Gaussian(0.0)]
    assert all(entry.grid == (1 - 30, 1 - 30) for entry in entries)
    for entry, upload in zip(entries, uploads, strict=True):
        assert upload.integers is not None
        assert entry.note == f"released sha256 {hashlib.sha256(upload.integers.numpy().tobytes()).hexdigest()}"


def test_the_state_is_for_its_owner_alone(tmp_path: Path) -> None:
    for t in range(2):
        summed(tmp_path, t)
        assert (tmp_path / "noise-state.safetensors").stat().st_mode & 0o777 == 0o600


def test_a_round_that_is_done_again_hands_over_the_same_bits_and_costs_nothing(tmp_path: Path) -> None:
    """Also where what would be summed has changed: it left already."""
    first = summed(tmp_path, 0)
    for update in (UPDATE, 2 * UPDATE):
        again = summed(tmp_path, 0, update)
        assert torch.equal(first.integers, again.integers)  # type: ignore[arg-type]
    assert len(rows(tmp_path)) == 1
    summed(tmp_path, 1)
    assert len(rows(tmp_path)) == 2


def test_a_crash_between_state_and_ledger_charges_when_it_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed(tmp_path, 0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BudgetedLedger, "charge_once", _crash)
        summed(tmp_path, 1)
    assert len(rows(tmp_path)) == 1
    state = (tmp_path / "noise-state.safetensors").read_bytes()
    summed(tmp_path, 1)
    assert len(rows(tmp_path)) == 2
    assert (tmp_path / "noise-state.safetensors").read_bytes() == state


def _crash(*_: object) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_lost_or_older_state_ends_the_run_however_often_it_is_tried(at: int, tmp_path: Path) -> None:
    """The redone round would leave with other noise; the first refusal must not make the second try pass."""
    state, older = tmp_path / "noise-state.safetensors", b""
    for t in range(at + 1):
        older = state.read_bytes() if state.exists() else b""
        summed(tmp_path, t)
    if older:
        state.write_bytes(older)
    else:
        state.unlink()
    for _ in range(3):
        with pytest.raises(LedgerError, match=f"round {at} was released before"):
            summed(tmp_path, at)
    assert len(rows(tmp_path)) == at + 1


def test_a_state_that_is_lost_later_ends_the_run(tmp_path: Path) -> None:
    summed(tmp_path, 0)
    (tmp_path / "noise-state.safetensors").unlink()
    with pytest.raises(LedgerError, match="of round -1: round 1 cannot be released"):
        summed(tmp_path, 1)
    assert len(rows(tmp_path)) == 1
