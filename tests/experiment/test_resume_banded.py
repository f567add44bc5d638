"""Runs with correlated, secret noise, killed at every step of a release: no round ever leaves in two versions."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedveil.experiment.run as module
import fedveil.federation.fit as fitting
from fedveil.errors import LedgerError
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.mechanism.mechanisms import NoiseMemory
from fedveil.release.door import Door
from resumed_runs import case, entries, go

ROUNDS = 6
STATE = "noise-state.safetensors"


def secret() -> Any:
    configuration = case("banded-mf")
    return configuration.model_copy(update={"run": configuration.run.model_copy(update={"seeded_noise": False})})


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_the_state(at: int, patch: pytest.MonkeyPatch) -> None:
    """Killed with noise drawn, while the state is being written."""
    real = os.fsync

    def synced(descriptor: int) -> None:
        if f"{STATE}.part" in os.readlink(f"/proc/self/fd/{descriptor}") and next(rounds) == at:
            die()
        real(descriptor)

    rounds = iter(range(99))
    patch.setattr(os, "fsync", synced)


def before_the_charge(at: int, patch: pytest.MonkeyPatch) -> None:
    """Killed with the state on disk, and nothing in the ledger."""
    real = NoiseMemory.write

    def written(self: NoiseMemory, arrays: Any) -> None:
        real(self, arrays)
        if int(arrays["round"][0]) == at:
            die()

    patch.setattr(NoiseMemory, "write", written)


def before_the_server(at: int, patch: pytest.MonkeyPatch) -> None:
    """Killed with the row in the ledger, before anybody got the release."""
    real = BudgetedLedger.charge_once

    def charged(self: BudgetedLedger, entry: Any, *, digest: str) -> None:
        real(self, entry, digest=digest)
        if entry.round == at:
            die()

    patch.setattr(BudgetedLedger, "charge_once", charged)


def before_the_checkpoint(at: int, patch: pytest.MonkeyPatch) -> None:
    """Killed when the release had left and the model had moved."""
    real = module.Checkpoints.begin

    def save(self: Any, progress: Any) -> None:
        if progress.round == at + 1:
            die()
        real(self, progress)

    patch.setattr(module.Checkpoints, "begin", save)


MOMENTS: list[Callable[[int, pytest.MonkeyPatch], None]] = [
    before_the_state,
    before_the_charge,
    before_the_server,
    before_the_checkpoint,
]


def trained(path: Path, kept: Path, moment: Callable[[int, pytest.MonkeyPatch], None] | None = None, at: int = 0) -> Any:
    """Run or resume, keep what each round released, and die at that moment of round `at`."""
    kept.mkdir()
    step = fitting._step

    def keeping(federation: Any, progress: Any, uploads: Any) -> float:
        torch.save(uploads[0].integers.clone(), kept / str(progress.round))
        moved: float = step(federation, progress, uploads)
        return moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_step", keeping)
        if moment is not None:
            moment(at, patch)
        return go(secret(), path, resume=path.exists())


def killed(path: Path, kept: Path, moment: Callable[[int, pytest.MonkeyPatch], None], at: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            trained(path, kept, moment, at)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.few(2)
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir() or not hasattr(os, "fork"), reason="forks its victim; needs /proc")
@pytest.mark.parametrize(
    ("at", "moment"),
    [
        pytest.param(at, moment, marks=[pytest.mark.slow] * ((at > 0) == number % 2))
        for at in (0, 3)
        for number, moment in enumerate(MOMENTS)
    ],
)
def test_a_round_leaves_once_and_the_run_ends_within_its_budget(
    at: int, moment: Callable[[int, pytest.MonkeyPatch], None], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    killed(path, tmp_path / "first", moment, at)
    if (path / STATE).exists():
        assert stat.S_IMODE((path / STATE).stat().st_mode) == 0o600
    killed(path, tmp_path / "second", before_the_checkpoint, at)  # the resumed run dies in the same round
    result = trained(path, tmp_path / "third")
    assert result.ended == ""
    assert len(result.history) == ROUNDS
    assert [e.round for e in entries(path)] == list(range(ROUNDS))
    assert stat.S_IMODE((path / STATE).stat().st_mode) == 0o600
    assert not list(path.glob("*.part"))
    releases: dict[str, set[bytes]] = {}
    for kept in ("first", "second", "third"):
        for file in (tmp_path / kept).iterdir():
            releases.setdefault(file.name, set()).add(torch.load(file).numpy().tobytes())
    assert sorted(releases) == [str(t) for t in range(ROUNDS)]
    assert all(len(versions) == 1 for versions in releases.values())
    seen = [(tmp_path / kept / str(at)).exists() for kept in ("first", "second", "third")]
    assert seen == [moment is before_the_checkpoint, True, True]


def check_random_moments(folder: Path, kills: int) -> None:
    """Kill and resume at random moments; every release that left is in the ledger, and none of a round is another one's.

    Each process appends the digest of what left to a file, and syncs it, before anything is made of the release.
    """
    draw, hits, run_number = random.Random(11), 0, 0
    configuration = secret()
    began = time.monotonic()
    go(configuration, folder / "calm")
    lasts = time.monotonic() - began
    while hits < kills:
        path, out = folder / str(run_number), folder / f"left-{run_number}"
        run_number += 1
        patience = 0.7 * lasts
        while not (path / "summary.json").exists():
            if path.exists() and not (path / "ledger.sqlite").exists():
                break  # killed before it began
            hits += killed_while_it_hands_over(configuration, path, out, draw.uniform(0, patience))
            patience *= 1.2  # a fork of a large process is slow, and would be killed for ever before it gets anywhere
        left = [(int(t), digest) for t, digest in (line.split() for line in out.read_text().splitlines())] if out.exists() else []
        rows = entries(path) if (path / "ledger.sqlite").exists() else []
        held = {(e.round, e.note.removeprefix("released sha256 ")) for e in rows}
        assert len(held) == len(rows) == len({t for t, _ in held})
        assert set(left) <= held
        if (path / "summary.json").exists():
            assert {t for t, _ in left} == set(range(ROUNDS))
            assert [e.round for e in rows] == list(range(ROUNDS))


def killed_while_it_hands_over(configuration: Any, path: Path, out: Path, seconds: float) -> bool:
    """Run or resume in a process of its own, killed after so long; whether it was still running."""
    child = os.fork()
    if child == 0:
        real = Door.release_sum

        def noted(*arguments: Any, **named: Any) -> Any:
            upload = real(*arguments, **named)
            with out.open("a") as file:
                file.write(f"{upload.round} {hashlib.sha256(upload.integers.numpy().tobytes()).hexdigest()}\n")
                file.flush()
                os.fsync(file.fileno())
            return upload

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Door, "release_sum", noted)
                go(configuration, path, resume=(path / "ledger.sqlite").exists())
            os._exit(0)
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), "a resumed run ends by itself only when it is done"
    return status != 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its victims")
def test_killed_at_random_moments_no_round_leaves_unrecorded_or_in_two_versions(tmp_path: Path) -> None:
    check_random_moments(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its victims")
def test_killed_at_a_hundred_random_moments_no_round_leaves_unrecorded_or_in_two_versions(tmp_path: Path) -> None:
    check_random_moments(tmp_path, 100)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its victim")
def test_a_run_that_lost_the_state_of_its_noise_does_not_go_on(tmp_path: Path) -> None:
    for at in (0, 2):
        path = tmp_path / str(at)
        killed(path, tmp_path / f"first{at}", before_the_checkpoint, at)
        (path / STATE).unlink()
        with pytest.raises(LedgerError, match=r"start (a new run|anew)"):
            trained(path, tmp_path / f"second{at}")
        assert [e.round for e in entries(path)] == list(range(at + 1))
        assert not list((tmp_path / f"second{at}").iterdir())
