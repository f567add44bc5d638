"""Runs with secret noise, killed between the door and the checkpoint: the redone round draws anew, and the ledger has both."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import fedveil.experiment.run as module
import fedveil.federation.fit as fitting
from resumed_runs import case, entries, go

ROUNDS, KILLED = 4, 1


def released(configuration: Any, path: Path, kept: Path, *, resume: bool = False, kill: bool = False) -> None:
    """Run, keep what each round released, and perhaps die by SIGKILL before round `KILLED` is saved."""
    kept.mkdir()
    shown, save = fitting._server_uploads, module.Checkpoints.begin

    def keeping(federation: Any, uploads: Any) -> Any:
        torch.save([u.vector.clone() for u in uploads], kept / str(uploads[0].round))
        return shown(federation, uploads)

    def dying(self: Any, progress: Any) -> None:
        if progress.round == KILLED + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_server_uploads", keeping)
        if kill:
            patch.setattr(module.Checkpoints, "begin", dying)
        go(configuration, path, resume=resume)


def killed(configuration: Any, path: Path, kept: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            released(configuration, path, kept, kill=True)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its victim")
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("name", ["dp-fedavg aggregate", "dp-fedavg server"])
def test_no_draw_of_noise_is_repeated_and_both_are_charged(name: str, seeded: bool, tmp_path: Path) -> None:
    """All six clients take part, so that the redone round has the same updates and differs from the first by noise alone."""
    configuration = case(
        name, training={"rounds": ROUNDS, "clients_per_round": 6}, privacy={"epsilon": None, "noise_multiplier": 1.0}
    )
    configuration = configuration.model_copy(update={"run": configuration.run.model_copy(update={"seeded_noise": seeded})})
    path, vectors = tmp_path / "a", 6 if "server" in name else 1
    killed(configuration, path, tmp_path / "first")
    assert len(entries(path)) == 2 * vectors
    released(configuration, path, tmp_path / "second", resume=True)
    first, second = (torch.load(tmp_path / part / str(KILLED)) for part in ("first", "second"))
    assert len(first) == len(second) == vectors
    rounds = [e.round for e in entries(path)]
    if seeded:  # the same vectors again tell nothing new, and are charged once
        assert all(map(torch.equal, first, second))
        assert rounds == sorted([*range(ROUNDS)] * vectors)
        return
    std = entries(path)[0].noise_std[0] / (1 if "server" in name else 6)
    for one, other in zip(first, second, strict=True):
        assert int((one == other).sum()) < 5
        # two independent draws differ by sqrt(2) std; 610 normals: 12 % is more than four standard errors
        assert float((one - other).std()) == pytest.approx(2**0.5 * std, rel=0.12)
    assert rounds[: 3 * vectors] == sorted([0, KILLED, KILLED] * vectors)
    assert KILLED + 1 in rounds  # until the budget, which knows of both, is spent
    assert len(rounds) <= (ROUNDS + 1) * vectors
    assert len(set(rounds)) == ROUNDS - 1  # four planned rounds' worth, one of them spent twice
