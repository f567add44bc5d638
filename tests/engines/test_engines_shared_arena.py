"""The shared arena: a worker writes what a client keeps, the main process finds it in place, and it is freed in the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedveil.executors.pool as pool_module
from federation_runs import OWN, assert_same, config, finished, job
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.executors.pool_messages import SharedArena, WorkerArena, pack, read_reply, reply, unpack

LARGE: dict[str, Any] = {"model": {"name": "mlp", "hidden": [256]}, "training": {"rounds": 4, "clients_per_round": 5}}
BYTES = 4 * (64 * 256 + 256 + 256 * 10 + 10)
"""Of the model above."""


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_worker_writes_and_the_main_process_reads_the_same_memory(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:  # as on macOS, where an unnamed file serves
        monkeypatch.delattr(os, "memfd_create", raising=False)
    slots = SharedArena()
    assert slots.lend() is None, "nobody kept anything yet"
    slots.need(12_000)
    slot = slots.lend()
    assert slot is not None
    kept = {"weights": torch.arange(2000.0), "mask": torch.ones(4096, dtype=torch.bool), "small": torch.ones(3), "n": 5}
    message = reply(kept, WorkerArena(slots.handle, slot))  # type: ignore[arg-type]
    assert len(message) < 1500
    needed, got = read_reply(message, slots.filled(slot))
    assert needed == 8000 + 4096
    assert all(torch.equal(got[k], kept[k]) for k in ("weights", "mask", "small"))
    sent = pack(got, slots.place)
    assert len(sent) < 1500, "what lies in a slot is named, not sent"
    seen = unpack(sent, WorkerArena(slots.handle, None).tensor_at)
    seen["weights"][0] = -1
    assert got["weights"][0] == 0, "what a worker does to what it was given stays with it"
    slots.close()


def test_a_slot_is_free_when_the_last_tensor_in_it_is_gone() -> None:
    slots = SharedArena()
    slots.need(8192)
    slot = slots.lend()
    assert slot is not None
    _, got = read_reply(reply({"a": torch.ones(1024)}, WorkerArena(slots.handle, slot)), slots.filled(slot))  # type: ignore[arg-type]
    part = got["a"][10:20]
    del got
    others = [slots.lend() for _ in range(20)]
    assert slot not in others
    assert len({s.offset for s in others if s is not None}) == 20
    del part
    assert slots.lend() == slot
    slots.close()


def test_what_does_not_fit_goes_through_the_pipe_and_the_next_slots_are_larger() -> None:
    slots = SharedArena()
    slots.need(4096)
    slot = slots.lend()
    kept = {"a": torch.arange(5000.0)}
    needed, got = read_reply(reply(kept, WorkerArena(slots.handle, slot)), slots.filled(slot))  # type: ignore[arg-type]
    assert torch.equal(got["a"], kept["a"])
    assert slots.place(got["a"].numpy()) is None
    slots.need(needed)
    larger = slots.lend()
    assert larger is not None
    assert larger.size >= 20_000
    slots.give_back(larger)
    assert slots.lend() == larger
    slots.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["fedglp-adp", "fedanc", "ladp-fl"])
def test_models_of_clients_stay_out_of_the_pipes(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []  # (round, bytes) of each message
    pack, read = pool_module.pack, pool_module.read_reply

    def packed(value: Any, place: Any) -> bytes:
        message = pack(value, place)
        sizes.append((value[1].round, len(message)))
        return message

    def opened(message: bytes, there: Any) -> Any:
        needed, answer = read(message, there)
        sizes.append((run_round[0], len(message)))
        return needed, answer

    run_round = [0]
    monkeypatch.setattr(pool_module, "pack", packed)
    monkeypatch.setattr(pool_module, "read_reply", opened)
    configuration = config({"name": method, "variant": "published", **OWN.get(method, ({},))[0]}, "server", **LARGE)
    run = job(configuration, tmp_path / "pool")
    engine = ProcessPool(run.context, 2)
    each = engine.map

    def mapped(tasks: Any) -> Any:
        tasks = list(tasks)
        run_round[0] = tasks[0].released.round
        return each(tasks)

    monkeypatch.setattr(engine, "map", mapped)
    progress = finished(run, engine)
    kept = max(sum(t.nbytes for t in s.values() if isinstance(t, torch.Tensor)) for s in progress.privates.values() or [{}])
    assert kept > BYTES / 8 or method == "ladp-fl"
    large = [at for at, size in sizes if size > BYTES / 8]
    assert len(large) <= 4, "the first answer of each worker shows how large slots must be, and goes back by the pipe once"
    assert large.count(0) <= 2
    assert len(sizes) > 40
    reference = job(configuration, tmp_path / "inline")
    assert_same(progress, finished(reference, Inline(reference.context)))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_large_states_equal_inline_and_keep_no_files_open(start: str, tmp_path: Path) -> None:
    configuration = config({"name": "fedglp-adp", "variant": "published"}, "server", **LARGE)
    one, two = job(configuration, tmp_path / "inline"), job(configuration, tmp_path / "pool")
    folder = Path("/proc/self/fd")
    before = len(os.listdir(folder)) if folder.is_dir() else 0
    progress = finished(two, ProcessPool(two.context, 2, start))
    assert not before or len(os.listdir(folder)) < before + 10
    assert_same(progress, finished(one, Inline(one.context)))


def test_an_array_elsewhere_has_no_place() -> None:
    slots = SharedArena()
    slots.need(4096)
    assert slots.lend() is not None
    assert slots.place(np.zeros(2000)) is None
    slots.close()
