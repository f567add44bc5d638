"""Configurations, data files and run directories with seeded damage, and the program called on them in this process."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import random
import re
import signal
import struct
import sys
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import tomli_w

from fedveil.cli.app import main

SECONDS = 10.0
"""How long a case may take; one that works longer is interrupted, as a user would."""
ALLOWED = {0, 1, 2, 3}
LONG = 10**5


class TooLong(BaseException):
    """A case still works when its time is over."""


@dataclass(frozen=True)
class Ended:
    """How a call of the program ended.

    status: its exit status; None where it was interrupted after SECONDS. trace: of an error that is no exit.
    """

    command: str
    status: int | None
    out: str
    err: str
    trace: str = ""

    def fault(self) -> str:
        """What is wrong with this end, or nothing."""
        if self.trace:
            return self.trace
        if self.status is None:
            return ""
        lines = self.err.strip().splitlines()
        if self.status not in ALLOWED:
            return f"status {self.status}: {self.err}"
        cannot_tell = not lines and bool(self.out) and self.command == "verify"
        usage = self.err.startswith("Usage: fedveil ")
        if self.status == 2 and not (usage or cannot_tell) and not (len(lines) == 1 and lines[0].startswith("fedveil: ")):
            return f"status 2 with {len(lines)} lines: {self.err[:2000]}"
        if len(self.err) > 4 * LONG:
            return f"an error of {len(self.err)} characters"
        if odd := re.search(r"[\x00-\x08\x0b-\x1f\x7f]", self.err):
            return f"an error with the control character {odd.group()!r}: {self.err[:300]!r}"
        return ""


def program(*words: object) -> Ended:
    """The program, called in this process with what it prints caught."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooLong

    out, err, trace, status = io.StringIO(), io.StringIO(), "", None
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)  # again: the first may be taken for a client's failure
    try:
        with (
            patch.object(sys, "argv", ["fedveil", *map(str, words)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except TooLong:
        pass
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 99
    except BaseException:
        trace = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return Ended(str(words[0]), status, out.getvalue(), err.getvalue(), trace)


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file below a folder; SQLite's shared memory, which every reader writes, is left out."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.endswith("-shm"):
            found[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


# --- configurations ---------------------------------------------------------------------------------------------------

METHODS: tuple[dict[str, Any], ...] = (
    {"name": "dp-fedavg", "clip": 0.5},
    {"name": "fedavg"},
    {"name": "noisy-fedavg"},
    {"name": "aldp-fl"},
    {"name": "aldp-fl", "variant": "published"},
    {"name": "fedglp-adp"},
    {"name": "fedanc", "pretraining_steps": 3},
    {"name": "adaptive-clipping"},
    {"name": "dp-scaffold"},
    {"name": "banded-mf", "separation": 2},
    {"name": "ladp-fl"},
    {"name": "ldp-fed"},
    {"name": "fed-smp"},
    {"name": "nbafl"},
    {"name": "soteria"},
)
KEYS = {
    "data": ("name", "partition", "source", "data_dir", "client_test_fraction", "public_fraction", "features"),
    "data.partition": ("kind", "clients", "alpha", "shards", "labels", "sizes", "seed"),
    "public": ("data", "components"),
    "model": ("name", "hidden", "weights", "trainable", "input_shape", "classes", "recorded", "seed", "adapters"),
    "task": ("name", "classes", "quantiles", "delta"),
    "method": ("name", "clip", "variant", "momentum", "separation", "sigma", "mu", "fraction", "quantile", "server_lr"),
    "training": (
        *("rounds", "clients_per_round", "sampling", "local_epochs", "local_steps", "batch_size", "batch_clip", "schedule"),
        *("optimizer", "server_optimizer", "local", "example_clip", "evaluate_every", "max_update_norm", "client_timeout"),
    ),
    "training.optimizer": ("name", "lr", "momentum", "weight_decay"),
    "training.server_optimizer": ("name", "lr", "momentum", "betas", "eps", "relative_to_clip"),
    "privacy": (
        *("epsilon", "noise_multiplier", "delta", "unit", "adjacency", "view", "allow_vacuous_delta", "min_survivors"),
        *("colluders", "noise_place", "spare_attempts", "max_participations", "budget", "selection"),
    ),
    "run": ("seed", "seeded_noise", "clients_at_once", "precision", "final_model", "deterministic", "name", "plugins", "track"),
}
ODD: tuple[Any, ...] = (
    *(float("inf"), float("-inf"), float("nan"), 1e308, -1e308, 5e-324, 2**63 - 1, -(2**63), 2**53, -1, 0, 1, 2, 0.0, -0.0, 1.5),
    *(
        "",
        " ",
        "\x00",
        "\x1b[31m\r\n\t",
        "é\u202e",
        "a[/b]",
        "x" * LONG,
        "../..",
        "/",
        "inf",
        "1",
        "dp-fedavg",
        "digits",
        "users",
    ),
    *(True, False, [], {}, [[]], [1, 2], [1, "a"], {"a": 1}, {"a": {"b": [1]}}, [{}], ["x" * LONG], [0.5] * 1000, "server"),
)
WORDS: dict[str, tuple[Any, ...]] = {
    "view": ("server", "aggregate"),
    "unit": ("client", "example"),
    "adjacency": ("zero-out", "replace", "add-remove"),
    "sampling": ("fixed", "poisson"),
    "local": ("sgd", "dp-sgd"),
    "kind": ("iid", "dirichlet", "shards", "users", "label-skew", "quantity-skew"),
    "schedule": ("constant", "cosine"),
    "name": ("mlp", "linear", "lstm", "cnn", "regression", "classification", "adam", "sgd", "yogi", "text", "survival"),
}


def small_config(dice: random.Random) -> dict[str, Any]:
    """A valid or nearly valid configuration of a run that takes a tenth of a second."""
    return {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 4}},
        "model": {"name": "linear"},
        "method": dict(dice.choice(METHODS)),
        "training": {"rounds": 1, "clients_per_round": 4, "local_steps": 1},
        "privacy": {"epsilon": 8.0, "delta": 1e-3, "view": dice.choice(("aggregate", "server"))},
        "run": {"engine": "inline", "seed": 1},
    }


def odd_config(dice: random.Random) -> dict[str, Any]:
    """A small configuration with one to three changes."""
    config = small_config(dice)
    for _ in range(dice.choice((1, 1, 2, 3))):
        where = dice.choice(list(KEYS))
        key = dice.choice((*KEYS[where], *([] if dice.random() > 0.1 else ["unknown", "", "a.b", "\n"])))
        value = dice.choice(WORDS[key]) if key in WORDS and dice.random() < 0.4 else dice.choice(ODD)
        section: Any = config
        for part in where.split("."):
            section = section.setdefault(part, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[key] = value
        if dice.random() < 0.04:
            config[where.split(".")[0]] = dice.choice(ODD)
    return config


def config_text(dice: random.Random, config: dict[str, Any]) -> bytes:
    """As TOML; now and then damaged as text."""
    content = tomli_w.dumps(config).encode()
    if dice.random() < 0.08:
        content = damaged(dice, content)
    return content


# --- files ------------------------------------------------------------------------------------------------------------


def damaged(dice: random.Random, content: bytes) -> bytes:
    """Cut, emptied, with some bytes changed, doubled, or other bytes altogether."""
    how = dice.randrange(6)
    if how == 0:
        return content[: dice.randrange(max(1, len(content)))]
    if how == 1:
        return b""
    if how == 2:
        return dice.randbytes(dice.choice((1, 16, 300, 5000)))
    if how == 3:
        changed = bytearray(content)
        for _ in range(dice.choice((1, 3, 30))):
            if changed:
                changed[dice.randrange(len(changed))] = dice.randrange(256)
        return bytes(changed)
    if how == 4:
        return content + content
    return b"\xff\xfe" + content[::-1]


def odd_array(dice: random.Random, array: np.ndarray[Any, Any]) -> Any:
    """An array of another type, shape or content."""
    kind = dice.choice((np.float64, np.float16, np.int8, np.uint64, np.complex64, np.bool_, "U5", "S3", "M8[s]", object, "V4"))
    how = dice.randrange(8)
    if how == 0:
        with np.errstate(all="ignore"), contextlib.suppress(TypeError, ValueError):
            return array.astype(kind)
        return np.zeros(array.shape, kind)
    if how == 1:
        return array[: dice.randrange(len(array))]
    if how == 2:
        return array.reshape(-1)
    if how == 3:
        return np.full(array.shape, dice.choice((np.nan, np.inf, -1.0, 1e300)))
    if how == 4:
        return array[..., None]
    if how == 5:
        return np.array(dice.choice((0, "text", None, np.nan)), object if dice.random() < 0.3 else None)
    if how == 6:
        return array[:0]
    return np.full(array.shape, dice.choice((-1, 10, 255, 2**62)))


def npz_bytes(dice: random.Random) -> bytes:
    """A small data set as an npz archive, with one array odd, absent or added, or the archive damaged."""
    made = np.random.default_rng(dice.randrange(2**32))
    arrays: dict[str, Any] = {}
    for split, count in (("train", 40), ("test", 20)):
        arrays[f"x_{split}"] = made.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"y_{split}"] = made.integers(0, 10, count)
    for _ in range(dice.choice((0, 1, 1, 2))):
        key = dice.choice((*arrays, "users_train", "users_test", "more"))
        if key in arrays and dice.random() < 0.2:
            del arrays[key]
        else:
            arrays[key] = odd_array(dice, arrays.get(key, np.arange(40)))
    target = io.BytesIO()
    (np.savez if dice.random() < 0.5 else np.savez_compressed)(target, **arrays)
    content = target.getvalue()
    if dice.random() < 0.1:
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w") as archive:
            for key in arrays:
                archive.writestr(f"{key}.npy", dice.choice((b"", b"x", b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'")))
        content = target.getvalue()
    return damaged(dice, content) if dice.random() < 0.4 else content


CELLS = ("", " ", "nan", "inf", "1e999", "-", "é", "\x00", '"', "1,5", "0x10", "1_000", "٣", "9" * 400, "x" * 1000, "\r")
ENCODINGS = ("utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1", "cp037", "utf-7")


def csv_bytes(dice: random.Random) -> bytes:
    """A small table of four hospitals, with odd cells, columns, quotes or encoding."""
    rows = [["age", "dose", "site", "ill"]]
    rows += [[str(20 + i), str(i / 7), f"s{i % 4}", str(i % 2)] for i in range(40)]
    for _ in range(dice.choice((0, 1, 2, 8))):
        row = rows[dice.randrange(len(rows))]
        how = dice.randrange(4)
        if how == 0 and row:
            row.pop()
        elif how == 1:
            row.append(dice.choice(CELLS))
        elif row:
            row[dice.randrange(len(row))] = dice.choice(CELLS)
    if dice.random() < 0.1:
        rows = [[row[0] if i else "", *row[1:]] if row else row for i, row in enumerate(rows)]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=dice.choice((",", ",", ",", ";", "\t")), quoting=dice.choice((0, 0, 1))).writerows(rows)
    content = text.getvalue().encode(dice.choice(ENCODINGS), "replace")
    return damaged(dice, content) if dice.random() < 0.3 else content


def idx_files(dice: random.Random) -> dict[str, bytes]:
    """The four files of MNIST, small, of which one is damaged."""
    files = {}
    for split, count in (("train", 40), ("t10k", 20)):
        files[f"{split}-images-idx3-ubyte"] = struct.pack(">IIII", 0x803, count, 28, 28) + dice.randbytes(count * 784)
        labels = bytes(dice.randrange(10) for _ in range(count))
        files[f"{split}-labels-idx1-ubyte"] = struct.pack(">II", 0x801, count) + labels
    name = dice.choice(list(files))
    how = dice.randrange(4)
    if how == 0:
        files[name] = damaged(dice, files[name])
    elif how == 1:
        files[name + ".gz"] = damaged(dice, gzip.compress(files.pop(name)))
    elif how == 2:
        files[name] = struct.pack(">I", 0x803) + struct.pack(">III", *(dice.choice((0, 1, 28, 2**32 - 1)) for _ in range(3)))
    else:
        del files[name]
    return files


TABLE = {"target": "ill", "features": ["age", "dose"], "classes": 2, "train_examples": 32}


def write_data(dice: random.Random, folder: Path) -> dict[str, Any]:
    """Odd data in a folder; the sections of a configuration that names them."""
    kind = dice.choice(("npz", "csv", "csv", "idx"))
    if kind == "csv":
        name = dice.choice(("t.csv", "t.csv", "t.tsv"))
        (folder / name).write_bytes(csv_bytes(dice))
        source = {"file": str(folder / name), **TABLE}
        if dice.random() < 0.5:
            source |= {"client": "site", "clients": 3, "train_examples": 30}
        partition = {} if "client" in source else {"partition": {"kind": "iid", "clients": 4}}
        return {"data": {"source": source, **partition}}
    if kind == "npz":
        (folder / "mnist.npz").write_bytes(npz_bytes(dice))
    else:
        (folder / "mnist").mkdir()
        for name, content in idx_files(dice).items():
            (folder / "mnist" / name).write_bytes(content)
    return {"data": {"name": "mnist", "data_dir": str(folder), "partition": {"kind": "iid", "clients": 4}}}


OTHER_JSON = ("null", "7", "[]", "{}", '"text"', "[null]", '{"a": [1]}', "NaN", "1e999", "[" * 3000, '{"counts": [[1], [1, 2]]}')


def damage_file(dice: random.Random, file: Path) -> str:
    """Damage one file of a run directory; what was done."""
    how = dice.choice(("bytes", "bytes", "bytes", "json", "json inside", "remove", "folder", "loop", "dangling"))
    content = file.read_bytes()
    if how == "bytes":
        file.write_bytes(damaged(dice, content))
    elif how == "json":
        file.write_text(dice.choice(OTHER_JSON))
    elif how == "json inside":
        file.write_bytes(_changed_inside(dice, content))
    else:
        file.unlink()
        if how == "folder":
            file.mkdir()
        elif how == "loop":  # which nobody can read, not even the superuser
            file.symlink_to(file.name)
        elif how == "dangling":
            file.symlink_to("absent")
    return how


def _changed_inside(dice: random.Random, content: bytes) -> bytes:
    """A JSON file with one value replaced by another or removed, a table with an odd cell; else damaged."""
    try:
        value = json.loads(content)
    except ValueError:
        lines = content.split(b"\n")
        if len(lines) < 2 or b"," not in lines[0]:
            return damaged(dice, content)
        at = dice.randrange(len(lines))
        cells = lines[at].split(b",")
        cells[dice.randrange(len(cells))] = dice.choice(CELLS).encode()
        lines[at] = b",".join(cells)
        return b"\n".join(lines)
    places = list(_places(value))
    if not places:
        return b"[]"
    holder, key = dice.choice(places)
    if isinstance(holder, dict) and dice.random() < 0.3:
        del holder[key]
    else:
        holder[key] = dice.choice((None, [], {}, "x", -1, 1e308, True, [[None]], {"a": 1}, 2**70))
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()):
        yield value, key
        yield from _places(inner)
