"""Methods that say that their clients keep nothing of one round for the next: without their private states nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from federation_runs import bits, every_method, job
from fedveil.configuration.public_setting import method_of
from fedveil.engines.inline import Inline
from fedveil.federation.fit import fit
from fedveil.federation.progress import Progress, start
from fedveil.methods.run_cost import is_memoryless

RUNS = {
    name: configuration
    for name, configuration in every_method()
    if name.endswith("aggregate") and "published" not in name and configuration.training.local != "dp-sgd"
}
REMEMBER = {"dp-scaffold", "fedglp-adp", "fed-dpa", "fed-addp"}


def forget(progress: Progress) -> None:
    progress.privates.clear()


def model(name: str, folder: Path, after_round: Callable[[Progress], None] | None) -> bytes:
    run = job(RUNS[name], folder)
    progress = start(run)
    assert fit(run, Inline(run.context), progress, after_round) == ""
    return bits(progress.model)


@pytest.mark.parametrize("name", RUNS)
def test_what_clients_send_follows_from_nothing_that_they_keep(name: str, tmp_path: Path) -> None:
    configuration = RUNS[name]
    same = model(name, tmp_path / "kept", None) == model(name, tmp_path / "forgotten", forget)
    assert same == (configuration.method.name not in REMEMBER)
    if is_memoryless(method_of(configuration)):
        assert same
