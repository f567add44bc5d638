"""Checkpoints: continuing gives the same bits for every method; a full disk loses nothing; foreign ones are refused."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from federation_runs import assert_same, bits, charged, config, covering, every_method, job
from fedveil.errors import ConfigError, FedveilError
from fedveil.executors.inline import Inline
from fedveil.experiment.config import Config
from fedveil.federation import plain_state
from fedveil.federation.checkpoint import Checkpoints
from fedveil.federation.fit import fit
from fedveil.federation.history import Record
from fedveil.federation.progress import Progress, start

RUNS = dict(every_method())
ME = {"run": "r"}


class Crash(BaseException):
    pass


def until(configuration: Config, folder: Path, rounds: int, saved: Checkpoints, after: bool = True) -> Progress:
    """Go on from what was saved; crash when `rounds` are done, after or before they are saved."""
    run = job(configuration, folder)
    progress = saved.load() or start(run)

    def stop(progress: Progress) -> None:
        if progress.round == rounds and not after:
            raise Crash
        saved.save(progress)
        if progress.round == rounds:
            raise Crash

    with contextlib.suppress(Crash):
        fit(run, Inline(run.context), progress, stop)
    return progress


@pytest.mark.few(4)
@pytest.mark.parametrize("name", covering(RUNS, 2))
@pytest.mark.heavy
def test_going_on_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    configuration = RUNS[name]
    adam = configuration.training.server_optimizer.model_copy(update={"name": "adam", "lr": 0.01})
    configuration = configuration.model_copy(
        update={"training": configuration.training.model_copy(update={"server_optimizer": adam})}
    )
    calm = job(configuration, tmp_path / "calm")
    reference = start(calm)
    fit(calm, Inline(calm.context), reference)
    folder = tmp_path / "saved"
    until(configuration, tmp_path / "run", 1, Checkpoints(folder, ME))
    until(configuration, tmp_path / "run", 2, Checkpoints(folder, ME), after=False)
    until(configuration, tmp_path / "run", 2, Checkpoints(folder, ME))
    last = until(configuration, tmp_path / "run", 99, Checkpoints(folder, ME))
    assert_same(last, reference)
    assert charged(tmp_path / "run") == charged(tmp_path / "calm")
    loaded = Checkpoints(folder, ME).load()
    assert loaded is not None
    assert_same(loaded, reference)
    assert not list(folder.glob("*.part"))


@pytest.mark.heavy
def test_a_disk_that_fills_up_at_any_write_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = config({"name": "aldp-fl", "variant": "published"}, "server")
    calm = job(configuration, tmp_path / "calm")
    reference = start(calm)
    fit(calm, Inline(calm.context), reference)
    real = os.fsync
    for at in (1, 2, 3, 4, 5, 7, 9, 11, 14):
        left = iter([real] * (at - 1))

        def full(descriptor: int, left: Iterator[Callable[[int], None]] = left) -> None:
            if "/saved" in os.readlink(f"/proc/self/fd/{descriptor}") and next(left, None) is None:
                raise OSError(28, "No space left on device")
            real(descriptor)

        folder = tmp_path / f"saved{at}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            run = job(configuration, tmp_path / f"a{at}")
            with pytest.raises(FedveilError, match=r"No space left on device; the \d rounds before are safe"):
                fit(run, Inline(run.context), start(run), Checkpoints(folder, ME).save)
        assert_same(until(configuration, tmp_path / f"b{at}", 99, Checkpoints(folder, ME)), reference)


def test_states_are_rewritten_only_when_they_change(tmp_path: Path) -> None:
    configuration = config(
        {"name": "aldp-fl", "variant": "published"},
        "server",
        data={"partition": {"kind": "iid", "clients": 30}},
        training={"clients_per_round": 2, "rounds": 4},
    )
    saved = Checkpoints(tmp_path / "saved", ME)
    progress = until(configuration, tmp_path / "a", 99, saved)
    sizes = [path.stat().st_size for path in (tmp_path / "saved").glob("states-*")]
    one = bits(progress.privates[next(iter(progress.privates))]["window"])
    assert len(progress.privates) > 2
    assert max(sizes) < 2 * len(one) + 3000


def test_a_model_is_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    last = until(RUNS["fedavg-aggregate"], tmp_path / "a", 2, Checkpoints(folder, ME))
    assert sorted(path.name for path in folder.glob("global-*")) == ["global-1.safetensors", "global-2.safetensors"]
    assert (folder / "global-2.safetensors").stat().st_size < 1.5 * last.model.nbytes
    loaded = Checkpoints(folder, ME).load()
    assert loaded is not None
    assert_same(loaded, last)


def test_a_model_that_was_changed_in_place_is_written_again(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path / "saved", ME)
    last = until(RUNS["fedavg-aggregate"], tmp_path / "a", 1, saved)
    last.round, last.previous, last.model = 2, last.model, last.model.clone()
    last.previous.add_(1)
    last.history.append(Record({"round": 1}))
    saved.save(last)
    loaded = Checkpoints(tmp_path / "saved", ME).load()
    assert loaded is not None
    assert loaded.previous is not None
    assert loaded.previous.equal(last.previous)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.int16])
def test_any_tensor_comes_back_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    odd = torch.arange(6).remainder(2).to(dtype)
    tree = {"a": odd, "b": torch.arange(12.0).view(3, 4).t(), "c": [torch.tensor(7), torch.zeros(0)], "d": (odd[1:4], {3: "x"})}
    (tmp_path / "tree").write_bytes(b"".join(plain_state.tree_parts(tree)))
    found = plain_state.read_tree(tmp_path / "tree")
    assert list(found) == list(tree)
    for one, other in ((found["a"], odd), (found["b"], tree["b"]), (found["c"][0], torch.tensor(7)), (found["d"][0], odd[1:4])):
        assert one.dtype == other.dtype
        assert one.equal(other)
    assert found["c"][1].shape == (0,)
    assert found["d"][1] == {3: "x"}


def test_a_foreign_or_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    until(RUNS["fedavg-aggregate"], tmp_path / "a", 1, Checkpoints(folder, ME))
    with pytest.raises(ConfigError, match="another run"):
        Checkpoints(folder, {"run": "other"}).load()
    (folder / "journal.jsonl").write_bytes(b"")
    with pytest.raises(FedveilError, match="damaged"):
        Checkpoints(folder, ME).load()
    assert Checkpoints(tmp_path / "none", ME).load() is None


def _flip(path: Path, at: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": _flip,
    "gone": Path.unlink,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["global-2.safetensors", "states-*.safetensors", "journal.jsonl"])
def test_damage_to_any_file_is_noticed_and_the_advice_knows_of_the_ledger(name: str, how: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    until(RUNS["aldp-fl-published-server"], tmp_path / "a", 2, Checkpoints(folder, ME))
    DAMAGE[how](sorted(folder.glob(name))[0])
    with pytest.raises(FedveilError, match=r"is damaged .* The releases in this run's ledger still count"):
        Checkpoints(folder, ME).load()


def test_files_that_safetensors_cannot_read_are_damage_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved"
    until(RUNS["fedavg-aggregate"], tmp_path / "a", 1, Checkpoints(folder, ME))

    def refuse(*_: object) -> None:
        raise SafetensorError("header too small")

    monkeypatch.setattr(plain_state, "safe_open", refuse)
    with pytest.raises(FedveilError, match=r"damaged .*header too small"):
        Checkpoints(folder, ME).load()


@pytest.mark.parametrize("key", ["sha256", "previous"])
def test_a_checkpoint_of_an_earlier_version_is_refused(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    until(RUNS["fedavg-aggregate"], tmp_path / "a", 1, Checkpoints(folder, ME))
    head = json.loads((folder / "head.json").read_text())
    del head[key]
    (folder / "head.json").write_text(json.dumps(head))
    with pytest.raises(FedveilError, match="of an earlier version: go on with that one"):
        Checkpoints(folder, ME).load()


def test_a_read_only_place_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = job(RUNS["fedavg-aggregate"], tmp_path / "a")
    with pytest.raises(FedveilError, match="cannot save round 0"):
        Checkpoints(tmp_path / "file" / "saved", ME).save(start(run))
