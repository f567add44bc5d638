"""Forged runs: none is verified, but for those in which everything was written again; and a pin catches all of these."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fedveil.verify import verify_run
from run_mutations import Mutation, applied, changed, mutations
from verified_runs import KINDS, made

ONLY_A_PIN_CATCHES = {
    "closing, rewritten": ("ended",),
    "cut coherently, as ended early": ("all",),
    "row edited, chain rewritten": (
        "client",
        "clip",
        "coordinates",
        "count",
        "extras",
        "grid",
        "mechanism",
        "mu",
        "noise_std",
        "nonce",
        "note",
        "participants",
        "reads",
        "reason",
        "time",
        "whole_clip",
    ),
    "rows rearranged, chain rewritten": (
        "duplicated",
        "exchanged",
    ),
    "statement's number, bound, with its page": (
        "learnability.advice.clients",
        "learnability.advice.to",
        "learnability.clip",
        "learnability.levels.noise_multiplier",
        "learnability.levels.ratio",
        "learnability.target_ratio",
        "views.releases.count",
    ),
    "statement's number, bound": (
        "learnability.advice.clients",
        "learnability.advice.now",
        "learnability.advice.to",
        "learnability.epsilon",
        "learnability.levels.noise_norm",
        "learnability.levels.ratio",
        "learnability.steps",
        "learnability.target_ratio",
        "views.claimed.epsilon",
        "views.releases.count",
    ),
    "table, bound": (
        "fewer participants of history.csv",
        "fewer participants of private/history.csv",
        "last row dropped of layers.csv",
        "last row dropped of private/history.csv",
        "last row dropped of private/layers.csv",
        "last row dropped of private/participants.csv",
        "numbers raised of history.csv",
        "numbers raised of layers.csv",
        "numbers raised of private/history.csv",
        "numbers raised of private/layers.csv",
        "numbers raised of private/participants.csv",
        "row repeated of layers.csv",
        "row repeated of private/history.csv",
        "row repeated of private/layers.csv",
        "row repeated of private/participants.csv",
    ),
}
"""By kind of change, the fields; in all of them chain, head, digests and closing are rewritten. See docs/verify-mutations.md."""
DECLARED = {f"{way}: {field}" for way, fields in ONLY_A_PIN_CATCHES.items() for field in fields}
ALWAYS = 36


def tried(chosen: list[Mutation], runs: dict[str, Path], folder: Path) -> tuple[set[str], int]:
    """Names of the changes that come out verified without a pin, and how many changes changed anything."""
    slipped, real = set(), 0
    pins = {name: verify_run(path).closing for name, path in runs.items()}
    for mutation in chosen:
        run = applied(mutation, runs, folder)
        if not changed(run, runs[mutation.run]):
            continue
        real += 1
        if verify_run(run).exit_status == 0:
            assert mutation.name in DECLARED, f"{mutation.run}: {mutation.name} ({mutation.detail}) is verified"
            assert verify_run(run, pin=pins[mutation.run]).exit_status == 1, f"no pin catches {mutation}"
            slipped.add(mutation.name)
    return slipped, real


@pytest.mark.heavy
def test_a_choice_of_all_kinds_of_changes_is_caught(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = {kind: made(tmp_path_factory, kind) for kind in KINDS}
    shuffled = mutations(runs)
    random.Random(7).shuffle(shuffled)
    first = {mutation.way: mutation for mutation in reversed(shuffled)}
    rest = [mutation for mutation in shuffled if mutation is not first[mutation.way]]
    _, real = tried([*first.values(), *rest[: ALWAYS - len(first)]], runs, tmp_path)
    assert real > 0.9 * ALWAYS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_change_is_caught(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = {kind: made(tmp_path_factory, kind) for kind in KINDS}
    slipped, real = tried(mutations(runs), runs, tmp_path)
    assert real > 4000
    assert slipped == DECLARED, "a change that is caught by now is still listed"
