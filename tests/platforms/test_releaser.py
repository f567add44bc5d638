"""Releaser and NoisyMean: the bits of the run's own door, charged before they are returned; everything odd is refused."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.ledger.files import head_path, read_head
from fedveil.ledger.ledger import Entry, Ledger
from fedveil.methods.base import gaussian_plan
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.training.params import Layout

NUMBERS: dict[str, Any] = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-5, "rounds": 3, "clients": 12}
SHAPES = {"weight": (40, 30), "bias": (30,), "scale": ()}


def releaser(folder: Path, **more: Any) -> fv.Releaser:
    return fv.Releaser(**{**NUMBERS, "ledger": folder / "site.ledger", **more})


def update(seed: int = 0, scale: float = 1.0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {name: np.asarray(scale * draw.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def released(folder: Path) -> int:
    path = folder / "site.ledger"
    return read_head(path)[0] if path.exists() else 0


def rows(folder: Path) -> list[Entry]:
    with Ledger.open(folder / "site.ledger", read_only=True) as ledger:
        return [entry for _, _, entry in ledger.entries()]


def flat(arrays: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays.values()]))


@pytest.mark.parametrize("scale", [1e-40, 1e-3, 1.0, 1e20, 5e37])
def test_the_bits_are_those_of_the_runs_own_door(tmp_path: Path, scale: float) -> None:
    release = releaser(tmp_path, seed=7)
    rounds = [release(update(t, scale)) for t in range(3)]
    path, layout = tmp_path / "other", Layout.of(SHAPES)
    path.mkdir()
    other = releaser(path, seed=7, like=update())
    plan = gaussian_plan(other._setting, 1.0)
    with other._ledger() as ledger:
        door = Door(layout, other._scope, "releaser", ledger, Randomness(7, True), max_norm=np.inf)
        for t, ours in enumerate(rounds):
            theirs = door.upload(flat(update(t, scale)), plan, 0, t)
            assert torch.equal(flat(ours), theirs.vector)
    assert [replace(row, note="") for row in rows(tmp_path)] == rows(path)


def test_the_mean_has_the_bits_of_the_runs_own_door(tmp_path: Path) -> None:
    mean = fv.NoisyMean(**NUMBERS, ledger=tmp_path / "sum.ledger", seed=7, place="sum", like=update())
    updates = [update(client, 0.01) for client in range(10)]
    ours = mean([*updates, None])
    plan = gaussian_plan(mean._setting, 1.0)
    with mean._ledger() as ledger:
        door = Door(Layout.of(SHAPES), mean._scope, "releaser", ledger, Randomness(7, True))
        theirs = door.release_sum([door.seal(flat(one), plan, place, 0) for place, one in enumerate(updates)], plan, 0, 12)
    assert torch.equal(flat(ours), theirs.vector)


def test_arrays_come_back_as_they_came(tmp_path: Path) -> None:
    given = {
        "batches": np.array(12345678901),
        "half": np.full(3, 60000, np.float16),
        "double": np.ones((2, 2)),
        "big-endian": np.ones(2, ">f4"),
        "empty": np.ones((0, 4), np.float32),
        "steps": np.arange(4, dtype=np.uint8),
    }
    before, release = copy.deepcopy(given), releaser(tmp_path, clip=1e6)
    back = release(given)
    assert list(back) == list(given)
    assert all((back[n].dtype, back[n].shape, type(back[n])) == (a.dtype, a.shape, np.ndarray) for n, a in given.items())
    assert np.array_equal(back["batches"], given["batches"])
    assert np.array_equal(back["steps"], given["steps"])
    assert not np.shares_memory(back["steps"], given["steps"])
    assert all(np.isfinite(back[name]).all() for name in ("half", "double", "big-endian"))
    assert not np.array_equal(back["double"], given["double"])
    assert all(np.array_equal(before[name], given[name]) for name in given)
    assert "batches, steps" in str(release.statement)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": np.array([1.0, np.nan])},
        {"weight": np.array([1.0, np.inf])},
        {"weight": np.array([1e39, 0.0])},
        {"weight": np.array([1.0, 2.0], object)},
        {"weight": np.array([1j, 2])},
        {"weight": np.array([True, False])},
        {"weight": np.array(["a", "b"])},
        {"weight": np.ma.masked_array([1.0, 2.0], [0, 1])},
        {"weight": np.rec.array([1.0, 2.0])},
        {"weight": np.float32(1)},
        {"weight": [1.0, 2.0]},
        {"weight": torch.ones(2)},
        {"weight": np.zeros(2, [("x", "f4")])},
        {"weight": np.zeros(2, "M8[s]")},
        {"weight": np.ones((2, 1))},
        {"weight": np.ones(2, np.float32)},
        {"weight": np.ones(2, np.int64)},
        {"bias": np.ones(2)},
        {"weight": np.ones(2), "bias": np.ones(2)},
        {1: np.ones(2)},
        {},
        [np.ones(2)],
        None.__class__,
    ],
    ids=str,
)
def test_everything_else_is_refused_before_anything_leaves(tmp_path: Path, wrong: Any) -> None:
    release = releaser(tmp_path, like={"weight": np.ones(2)})
    with pytest.raises(fv.UpdateRefused):
        release(wrong)
    assert released(tmp_path) == 0
    release({"weight": np.ones(2)})
    assert released(tmp_path) == 1


def test_the_order_of_the_keys_is_that_of_the_first_update(tmp_path: Path) -> None:
    release, first = releaser(tmp_path, seed=1), update()
    release(first)
    other = releaser(tmp_path, ledger=tmp_path / "other", seed=1)
    other(first)
    assert list(other(dict(reversed(first.items())))) == list(first)


def test_a_lifetime_ends_after_its_rounds_in_whatever_process(tmp_path: Path) -> None:
    for _ in range(3):
        releaser(tmp_path)(update())
    for release in (releaser(tmp_path), releaser(tmp_path, clip=5.0), releaser(tmp_path, rounds=30)):
        with pytest.raises(fv.BudgetExhausted, match="nothing was released"):
            release(update())
    assert released(tmp_path) == 3


@pytest.mark.parametrize("other", [{"epsilon": 9.0}, {"delta": 1e-6}])
def test_a_ledger_of_other_numbers_is_refused(tmp_path: Path, other: dict[str, float]) -> None:
    release = releaser(tmp_path, **other)
    releaser(tmp_path)(update())
    with pytest.raises(fv.ConfigError, match="is not what"):
        releaser(tmp_path, **other)
    with pytest.raises(fv.ConfigError, match="is not what"):
        release(update())
    with pytest.raises(fv.ConfigError, match="is not what"):
        fv.NoisyMean(**NUMBERS, ledger=tmp_path / "site.ledger")
    assert released(tmp_path) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0}, {"clip": np.inf}, {"clip": "1"}, {"clip": True}, {"epsilon": -1}, {"epsilon": np.nan}, {"delta": 1},
        {"delta": 0.09}, {"rounds": 0}, {"rounds": 2.5}, {"clients": 0}, {"clients": True}, {"view": "aggregate"}, {"seed": -1},
        {"ledger": "no/such/folder/x"}, {"clip": 1e-300}, {"clip": 1e300}, {"clip": 1e40}, {"clip": 1e29, "epsilon": 1e-2},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_numbers_are_refused_at_once(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(fv.ConfigError):
        releaser(tmp_path, **wrong)
    assert not list(tmp_path.iterdir())


def test_scalars_of_numpy_are_numbers(tmp_path: Path) -> None:
    release = releaser(tmp_path, clip=np.float32(1), clients=np.int64(12), rounds=np.int32(3))
    assert (release.clip, release.clients, release.rounds) == (1.0, 12, 3)


def test_other_arrays_in_a_ledger_are_refused_unless_like_names_them(tmp_path: Path) -> None:
    """What the first update of an object decided was forgotten with the object, though its ledger went on."""
    release, other = releaser(tmp_path), {"w": np.ones(4)}
    release(update())
    again = releaser(tmp_path)
    for wrong in (other, {**update(), "bias": np.ones(30)}):
        with pytest.raises(fv.UpdateRefused, match="like="):
            again(wrong)
    again(dict(reversed(update().items())))
    assert released(tmp_path) == 2
    releaser(tmp_path, like=other)(other)
    assert len({row.run for row in rows(tmp_path)}) == 2
    assert rows(tmp_path)[-1].run.endswith(", clip 1, 3 rounds, 12 clients")
    assert released(tmp_path) == 3
    with pytest.raises(fv.BudgetExhausted):  # one lifetime all the same
        releaser(tmp_path)(other)
    assert fv.verification(tmp_path / "site.ledger").outcome == "verified"


@pytest.mark.parametrize("loss", ["removed", "older copy", "another one", "ledger alone"])
@pytest.mark.parametrize("copied", [lambda release: release, pickle.dumps])
def test_a_living_releaser_notices_that_its_ledger_was_removed_or_set_back(tmp_path: Path, loss: str, copied: Any) -> None:
    release, folder, before = releaser(tmp_path), tmp_path, tmp_path / "before"
    release(update())
    before.mkdir()
    files = [folder / "site.ledger", head_path(folder / "site.ledger")]
    for file in files:
        shutil.copy(file, before)
    release(update())
    kept = copied(release)
    for file in files[: 1 if loss == "ledger alone" else 2]:
        file.unlink()
    if loss == "older copy":
        shutil.copytree(before, folder, dirs_exist_ok=True)
    if loss == "another one":
        for _ in range(2):
            releaser(folder)(update())
    with pytest.raises(fv.LedgerError):
        (pickle.loads(kept) if isinstance(kept, bytes) else kept)(update())
    assert released(tmp_path) == {"older copy": 1, "another one": 2}.get(loss, 0)


def test_a_creation_that_was_killed_half_way_is_finished_by_the_next(tmp_path: Path) -> None:
    """The head is linked first, and without a ledger it locked everybody out."""
    program = f"""
import os, signal, numpy as np, fedveil as fv
link, calls = os.link, []
def killed(*arguments):
    if calls:
        os.kill(os.getpid(), signal.SIGKILL)
    calls.append(link(*arguments))
os.link = killed
fv.Releaser(**{NUMBERS!r}, ledger={str(tmp_path / "site.ledger")!r})({{"w": np.ones(3)}})
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert head_path(tmp_path / "site.ledger").exists()
    assert not (tmp_path / "site.ledger").exists()
    releaser(tmp_path)(update())
    assert released(tmp_path) == 1


def test_noise_from_a_seed_stands_in_the_ledger(tmp_path: Path) -> None:
    releaser(tmp_path)(update())
    releaser(tmp_path, seed=3)(update())
    assert [row.note for row in rows(tmp_path)] == ["", "noise from a seed"]
    verified = fv.verification(tmp_path / "site.ledger")
    assert verified.outcome == "contradicted"
    assert "noise from a seed in 1 of 2 releases" in str(verified.findings)


def test_the_statement_says_who_clips(tmp_path: Path) -> None:
    statements = [str(kind(**NUMBERS, ledger=tmp_path / "x", like=update()).statement) for kind in (fv.Releaser, fv.NoisyMean)]
    assert ["client's software clips" in text for text in statements] == [True, False]
    assert ["the server clips each contribution" in text for text in statements] == [False, True]


def test_numbers_that_arithmetic_makes_of_0_d_arrays_are_arrays(tmp_path: Path) -> None:
    """numpy's difference of two 0-d arrays is a scalar, as of Keras's 0-d weights."""
    one = {"scale": np.array(3.0, np.float32) - np.array(1.0, np.float32), "w": np.ones(2, np.float32)}
    assert type(one["scale"]) is np.float32
    back = releaser(tmp_path)(one)
    assert (type(back["scale"]), back["scale"].shape, back["scale"].dtype) == (np.ndarray, (), np.float32)


def test_none_releases_a_noised_zero(tmp_path: Path) -> None:
    with pytest.raises(fv.ConfigError, match="like="):
        releaser(tmp_path)(None)
    zero = releaser(tmp_path, like=update())(None)
    assert released(tmp_path) == 1
    assert 0.8 < np.std(flat(zero).numpy()) / releaser(tmp_path).noise_std < 1.2


def test_the_mean_refuses_what_it_cannot_average(tmp_path: Path) -> None:
    mean = fv.NoisyMean(**NUMBERS, ledger=tmp_path / "site.ledger", like=update())
    for wrong in ([update()] * 13, [update(), {"weight": np.ones(2)}], [{**update(), "n": np.array(1)}]):
        with pytest.raises(fv.UpdateRefused):
            mean(wrong)
    assert released(tmp_path) == 0
    with pytest.raises(fv.ConfigError, match="Releaser adds it to each upload"):
        fv.NoisyMean(**NUMBERS, ledger=tmp_path / "site.ledger", place="upload")  # type: ignore[arg-type]


def test_copies_threads_and_forks_share_the_lifetime(tmp_path: Path) -> None:
    release = releaser(tmp_path, rounds=6)
    first = release(update())
    copies = [copy.copy(release), copy.deepcopy(release), pickle.loads(pickle.dumps(release))]
    assert all(list(one(update())) == list(first) for one in copies[1:])
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(release(update()))
        except fv.BudgetExhausted as problem:
            results.append(problem)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    noisy = [flat(one).numpy() for one in results if isinstance(one, dict)]
    assert len(noisy) == 3
    assert len({one.tobytes() for one in noisy}) == 3
    child = os.fork()
    if not child:
        try:
            release(update())
        except fv.BudgetExhausted:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert released(tmp_path) == 6


def test_first_releases_at_once_share_one_new_ledger(tmp_path: Path) -> None:
    releasers, counted = [releaser(tmp_path, like=update()) for _ in range(5)], []

    def work(release: fv.Releaser) -> None:
        try:
            release(update())
            counted.append(1)
        except fv.BudgetExhausted:
            pass

    threads = [threading.Thread(target=work, args=(release,)) for release in releasers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counted) == released(tmp_path) == 3


@pytest.mark.heavy
def test_a_kill_between_charge_and_answer_is_charged(tmp_path: Path) -> None:
    program = f"""
import os, signal, numpy as np, fedveil as fv
import fedveil.release.array_door as door
door.from_grid = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
release = fv.Releaser(**{NUMBERS!r}, ledger={str(tmp_path / "site.ledger")!r})
release({{"w": np.ones(3)}})
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    with Ledger.open(tmp_path / "site.ledger") as ledger:
        assert len(ledger) == 1
    releaser(tmp_path)({"w": np.ones(3)})
    verified = fv.verification(tmp_path / "site.ledger")
    assert verified.exit_status == 0, verified.findings
    assert released(tmp_path) == 2


@pytest.mark.heavy
def test_a_full_disk_releases_nothing(tmp_path: Path) -> None:
    program = f"""
import resource, signal, numpy as np, fedveil as fv
r = fv.Releaser(clip=1.0, epsilon=8.0, delta=1e-5, rounds=500, clients=12, ledger={str(tmp_path / "site.ledger")!r})
r({{"w": np.ones(3)}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
try:
    r({{"w": np.ones(3)}})
except fv.LedgerError as problem:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "refused", done.stderr


def test_numpy_that_raises_on_underflow_changes_nothing(tmp_path: Path) -> None:
    tiny = update(0, 1e-42)
    with np.errstate(all="raise"):
        ours = releaser(tmp_path, seed=1)(tiny)
    other = releaser(tmp_path, ledger=tmp_path / "other", seed=1)(tiny)
    assert torch.equal(flat(ours), flat(other))


def test_verify_contradicts_a_changed_row(tmp_path: Path) -> None:
    releaser(tmp_path)(update())
    assert fv.verification(tmp_path / "site.ledger").exit_status == 0
    with pytest.raises(fv.ConfigError, match="closing digest"):
        fv.verification(tmp_path / "site.ledger", pin="0" * 64)
    with sqlite3.connect(tmp_path / "site.ledger") as database:
        triggers = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        changes = [f"DROP TRIGGER {name}" for name, _ in triggers] + ["UPDATE release SET mu = mu / 2"]
        for statement in (*changes, *(sql for _, sql in triggers)):
            database.execute(statement)
    database.close()
    assert fv.verification(tmp_path / "site.ledger").exit_status == 1
