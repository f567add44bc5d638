"""Runs cut at awkward moments: before the ledger is there, or when it counts clients that the checkpoint does not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import fedveil.experiment.run as module
from federation_runs import config
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from resumed_runs import entries, go, interrupted


def limited(most: int, *, seeded: bool) -> Config:
    """Forty clients, three a round, of which each may take part in `most` of twelve rounds."""
    return config(
        {"name": "dp-fedavg"},
        "server",
        data={"partition": {"kind": "iid", "clients": 40}},
        training={"rounds": 12, "clients_per_round": 3, "local_steps": 1},
        privacy={"max_participations": most},
        run={"seeded_noise": seeded},
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("at", [1, 3])
def test_clients_of_an_interrupted_round_count_as_having_taken_part(most: int, at: int, tmp_path: Path) -> None:
    configuration = limited(most, seeded=False)
    for _ in range(2):  # the second time before anything more is saved
        if (tmp_path / "a").exists():
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(module.Checkpoints, "begin", _interrupt)
                go(configuration, tmp_path / "a", resume=True)
        else:
            interrupted(configuration, tmp_path / "a", at)
    result = go(configuration, tmp_path / "a", resume=True)
    assert result.ended == ""
    releases = Counter(entry.client for entry in entries(tmp_path / "a"))
    if most == 2:
        assert len(result.history) == 12
        assert releases.total() == 3 * (12 + 2)
    assert max(releases.values()) <= most


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_with_seeded_noise_the_interrupted_round_samples_the_same_clients_again(tmp_path: Path) -> None:
    configuration = limited(1, seeded=True)
    go(configuration, tmp_path / "calm")
    interrupted(configuration, tmp_path / "a", 3)
    go(configuration, tmp_path / "a", resume=True)
    same = [(entry.round, entry.client) for entry in entries(tmp_path / "calm")]
    assert [(entry.round, entry.client) for entry in entries(tmp_path / "a")] == same
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "calm" / "model.safetensors").read_bytes()


# --- cut before the ledger is there -----------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("files", range(7))
def test_a_directory_of_a_run_that_never_began_is_used_again(files: int, tmp_path: Path) -> None:
    configuration = limited(1, seeded=True)
    real, left = module.rundir.write_bytes, iter(range(files))

    def write(path: Path, content: bytes) -> None:
        if next(left, None) is None:
            path.with_name(path.name + ".part").write_bytes(content[:9])
            raise KeyboardInterrupt
        real(path, content)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.rundir, "write_bytes", write)
        patch.setattr(module.Ledger, "create", _interrupt)
        go(configuration, tmp_path / "a")
    written = [file for file in (tmp_path / "a").rglob("*") if file.is_file()]
    assert len(written) == min(files + 1 + (files > 3), 7)  # the salt is written with the data card
    with pytest.raises(ConfigError, match="nothing to resume"):
        go(configuration, tmp_path / "a", resume=True)
    assert len(go(configuration, tmp_path / "a").history) == 12


@pytest.mark.parametrize(
    "names",
    [
        ["config.toml"],
        ["versions.json", "notes.txt"],
        ["versions.json", "config.toml", "ledger.sqlite"],
        ["versions.json", "config.toml", "ledger.sqlite-head"],
        ["versions.json", "config.toml", "ledger.sqlite-wal"],
        ["versions.json", "config.toml", "checkpoint"],
    ],
)
def test_any_other_directory_is_left_alone(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        go(limited(1, seeded=True), tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(names, "mine")
