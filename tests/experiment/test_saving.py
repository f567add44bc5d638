"""A round is saved beside the training of the next one, and nothing of the next one leaves before it is saved."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import fedveil.experiment.run as module
import fedveil.federation.round as client
from fedveil.errors import FedveilError
from fedveil.experiment.config import Config
from fedveil.federation import checkpoint
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from resumed_runs import case, entries, go, same_end

ROUNDS = 4


def inline(name: str, *, seeded: bool = True) -> Config:
    configuration = case(name, training={"rounds": ROUNDS})
    return configuration.model_copy(
        update={"run": configuration.run.model_copy(update={"engine": "inline", "seeded_noise": seeded})}
    )


class Watched:
    """What happens in which order: ("train" | "charge" | "saved" | "told", round); a write waits until a client has trained."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.trained = threading.Event()
        train, charge, write = client.trained, BudgetedLedger.charge_all, checkpoint.Checkpoints._write

        def training(context: Any, task: Any, plan: Any) -> Any:
            self.events.append(("train", task.released.round))
            self.trained.set()
            return train(context, task, plan)

        def charging(ledger: Any, entries: Any) -> None:
            self.events.append(("charge", entries[0].round))
            charge(ledger, entries)

        def writing(saved: Any, done: Any) -> None:
            self.trained.clear()
            if done.number < ROUNDS:
                assert self.trained.wait(30)
            write(saved, done)
            self.events.append(("saved", done.number - 1))

        patch.setattr(client, "trained", training)
        patch.setattr(BudgetedLedger, "charge_all", charging)
        patch.setattr(checkpoint.Checkpoints, "_write", writing)

    def when(self, what: str, round: int) -> int:
        return self.events.index((what, round))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["dp-fedavg aggregate", "dp-fedavg server", "aldp-fl proven"])
def test_clients_train_meanwhile_and_nothing_leaves_before(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(inline(name), tmp_path / "calm")
    watched = Watched(monkeypatch)
    told: list[int] = []

    def tell(row: Any) -> None:
        told.append(row["round"])
        watched.events.append(("told", row["round"]))

    from federation_runs import prepared, small_digits

    module.run(inline(name), tmp_path / "a", tell, data=small_digits(), partition=prepared(inline(name)).partition)
    assert told == [*range(ROUNDS)]
    for r in range(ROUNDS):
        assert watched.when("charge", r) < watched.when("saved", r) < watched.when("told", r)
        if r + 1 < ROUNDS:
            assert watched.when("train", r + 1) < watched.when("saved", r) < watched.when("charge", r + 1)
            assert watched.when("told", r) < watched.when("charge", r + 1)
    same_end(tmp_path / "a", tmp_path / "calm")


def test_a_round_that_cannot_be_saved_ends_the_run_before_the_next_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration, path = inline("dp-fedavg aggregate"), tmp_path / "a"
    go(configuration, tmp_path / "calm")
    real, told = checkpoint.Checkpoints._write, []

    def full(saved: Any, done: Any) -> None:
        if done.number == 2:
            raise OSError(28, "No space left on device")
        real(saved, done)

    from federation_runs import prepared, small_digits

    with (
        monkeypatch.context() as patch,
        pytest.raises(FedveilError, match=r"cannot save round 2 .* the 1 rounds before are safe"),
    ):
        patch.setattr(checkpoint.Checkpoints, "_write", full)
        module.run(configuration, path, told.append, data=small_digits(), partition=prepared(configuration).partition)
    assert [row["round"] for row in told] == [0]
    assert [entry.round for entry in entries(path)] == [0, 1]
    go(configuration, path, resume=True)
    same_end(path, tmp_path / "calm")


@pytest.mark.few(2)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its victim")
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_killed_while_a_round_is_written_and_the_next_one_trains(at: int, tmp_path: Path) -> None:
    """`at`: the sync of the second round's checkpoint that the run does not survive."""
    configuration, path = inline("dp-fedavg aggregate", seeded=False), tmp_path / "a"
    child = os.fork()
    if child == 0:
        try:
            killed_at(at, configuration, path)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [entry.round for entry in entries(path)] == [0, 1]
    go(configuration, path, resume=True)
    rounds = [entry.round for entry in entries(path)]
    again = [0, 1, 1] if at < 5 else [0, 1]  # once the head is renamed the round is saved
    assert rounds[: len(again) + 1] == [*again, 2]


def killed_at(at: int, configuration: Config, path: Path) -> None:
    trained, write, sync = threading.Event(), checkpoint.Checkpoints._write, os.fsync
    train, left = client.trained, iter(range(1, at))

    def training(context: Any, task: Any, plan: Any) -> Any:
        if task.released.round == 2:
            trained.set()
        return train(context, task, plan)

    def dying(descriptor: int) -> None:
        if "/checkpoint" in os.readlink(f"/proc/self/fd/{descriptor}") and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    def writing(saved: Any, done: Any) -> None:
        if done.number == 2:
            assert trained.wait(30)
            os.fsync = dying
        write(saved, done)

    client.trained = training
    checkpoint.Checkpoints._write = writing  # type: ignore[method-assign]
    go(configuration, path)


def test_interrupted_while_a_round_is_written_the_round_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration, path = inline("dp-fedavg aggregate"), tmp_path / "a"
    go(configuration, tmp_path / "calm")
    train, told = client.trained, []

    def interrupted(context: Any, task: Any, plan: Any) -> Any:
        if task.released.round == 2:
            raise KeyboardInterrupt
        return train(context, task, plan)

    from federation_runs import prepared, small_digits

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stop:
        patch.setattr(client, "trained", interrupted)
        module.run(configuration, path, told.append, data=small_digits(), partition=prepared(configuration).partition)
    assert "2 rounds are saved" in stop.value.__notes__[0]
    assert [row["round"] for row in told] == [0, 1]
    go(configuration, path, resume=True)
    same_end(path, tmp_path / "calm")


@pytest.mark.parametrize("started", [False, True])
def test_interrupted_as_the_writing_begins_the_run_says_how_to_go_on(
    started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, writers = checkpoint.RoundWriter.start, []

    def interrupted(writer: Any) -> None:
        writers.append(writer)
        if len(writers) == 3 and not started:
            signal.raise_signal(signal.SIGINT)
        start(writer)
        if len(writers) == 3 and started:
            signal.raise_signal(signal.SIGINT)

    configuration = inline("dp-fedavg aggregate")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.RoundWriter, "start", interrupted)
        with pytest.raises(KeyboardInterrupt) as stop:
            go(configuration, tmp_path / "r")
    assert len(writers) == 3
    assert f"interrupted; {writers[-1].round} rounds are saved" in stop.value.__notes__[0]
