"""Each original format from a tiny file of the same structure, and damaged or dangerous ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedveil.data.catalogue import CATALOGUE, DATA_SETS, Info
from fedveil.data.load import load
from fedveil.data.sources import people, pictures, raw
from fedveil.data.sources import raw as npz
from fedveil.data.sources.pictures import unpickle
from fedveil.data.sources.raw import RawData
from fedveil.errors import DataError

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


# idx


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(folder: Path, names: tuple[str, ...], gz: bool) -> list[np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [pixels(6, 28, 28), np.arange(6, dtype=np.uint8), pixels(3, 28, 28), np.arange(3, dtype=np.uint8)]
    for name, array in zip(names, arrays, strict=True):
        content = idx_bytes(array)
        (folder / (name + ".gz" * gz)).write_bytes(gzip.compress(content) if gz else content)
    return arrays


@pytest.mark.parametrize("gz", [False, True])
def test_mnist_files(tmp_path: Path, gz: bool) -> None:
    form = pictures.mnist_like(("fashion-mnist", "FashionMNIST/raw"))
    x_train, y_train, x_test, y_test = idx_files(tmp_path / "FashionMNIST" / "raw", pictures.IDX_FILES, gz)
    raw = form.read(tmp_path / "FashionMNIST" / "raw", CATALOGUE["fashion-mnist"])
    assert raw is not None
    assert np.array_equal(raw.x_train[:, 0], x_train)
    assert np.array_equal(raw.y_train, y_train)
    assert np.array_equal(raw.x_test[:, 0], x_test)
    assert np.array_equal(raw.y_test, y_test)


def test_mnist_files_are_not_taken_for_fashion_mnist(tmp_path: Path) -> None:
    idx_files(tmp_path / "mnist", pictures.IDX_FILES, gz=True)
    assert pictures.mnist_like(("fashion-mnist",)).read(tmp_path / "mnist", CATALOGUE["fashion-mnist"]) is None
    assert pictures.mnist_like(("fashion-mnist",)).read(tmp_path, CATALOGUE["fashion-mnist"]) is None


def test_missing_idx_file(tmp_path: Path) -> None:
    idx_files(tmp_path / "mnist", pictures.IDX_FILES, gz=True)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte \(or .gz\) is missing"):
        pictures.mnist_like(("mnist",)).read(tmp_path / "mnist", CATALOGUE["mnist"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"\x01\x00\x08\x01\x00\x00\x00\x01a", "not an idx file"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01aaaa", "idx type 0x0d"),
        (b"\x00\x00\x08\x09" + b"\x00" * 40, "with 9 dimensions"),
        (b"\x00\x00\x08\x03\x00\x00", "cut short"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02a", "promises 2 bytes for shape .*holds 1"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02aaa", "holds 3"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12 + b"a", "holds 1"),
    ],
)
def test_damaged_idx(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pictures.parse(content, "file")


def test_damaged_gzip() -> None:
    whole = gzip.compress(idx_bytes(np.arange(200, dtype=np.uint8)))
    for content in (b"nothing", whole[:-9], whole[:-50] + b"\x00\x00" + whole[-48:]):
        with pytest.raises(DataError, match="damaged gzip"):
            pictures.gunzip(content, "file")


def test_bombs_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of zeros, a header that promises one, more than the header says, and a zip member of that size."""
    zeros = gzip.compress(bytes(2**20)) * 1024
    with pytest.raises(DataError, match=r"bomb: idx type 0x00 with 0 dimensions"):
        pictures.gunzip(zeros, "bomb")
    header = struct.pack(">BBBB3I", 0, 0, 8, 3, 1_400_000, 28, 28)
    with pytest.raises(DataError, match=r"bomb: the header promises 1097600000 bytes; at most 536870912 are read"):
        pictures.gunzip(gzip.compress(header) + zeros, "bomb")
    short = gzip.compress(struct.pack(">BBBB1I", 0, 0, 8, 1, 6))
    assert len(pictures.gunzip(short + zeros, "bomb")) == 20 + 6 + 1
    with pytest.raises(DataError, match="the header promises 6 bytes"):
        pictures.parse(pictures.gunzip(short + zeros, "bomb"), "bomb")
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny-imagenet-200/wnids.txt", bytes(101))
    monkeypatch.setattr(raw, "MOST_BYTES", 100)
    with pytest.raises(DataError, match=r"wnids.txt unpacks to 101 bytes; at most 100 are read"):
        pictures.read_tinyimagenet(tmp_path, CATALOGUE["tinyimagenet"])


def test_an_npz_header_that_promises_terabytes_takes_no_memory(tmp_path: Path) -> None:
    arrays = {"y_train": np.arange(3), "x_test": pixels(2, 28, 28), "y_test": np.arange(2)}
    np.savez(tmp_path / "mnist.npz", **arrays)
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (10**9, 28, 28)})
    with zipfile.ZipFile(tmp_path / "mnist.npz", "a") as archive:
        archive.writestr("x_train.npy", file.getvalue() + bytes(80))
    with pytest.raises(DataError, match=r"header of array 'x_train' promises 6272000000000 bytes, the archive holds 80"):
        npz.plain(CATALOGUE["mnist"]).read(tmp_path, CATALOGUE["mnist"])


@pytest.mark.parametrize("zipped", [False, True])
def test_emnist_is_set_upright(tmp_path: Path, zipped: bool) -> None:
    loose = tmp_path / "loose"
    x_train, *_ = idx_files(loose, pictures.EMNIST_FILES, gz=True)
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        for name in pictures.EMNIST_FILES:
            archive.write(loose / f"{name}.gz", f"gzip/{name}.gz")
    raw = pictures.read_emnist(tmp_path if zipped else loose, CATALOGUE["emnist"])
    assert raw is not None
    assert np.array_equal(raw.x_train[2, 0], x_train[2].T)


def test_emnist_archive_without_the_files(tmp_path: Path) -> None:
    (tmp_path / "gzip.zip").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="not the original archive of EMNIST"):
        pictures.read_emnist(tmp_path, CATALOGUE["emnist"])


# coded CIFAR-10


def encode(x: np.ndarray) -> np.ndarray:
    """Inverse of npz.decode, written the other way round: differences of planes, then of columns and rows."""
    red, green, blue = (x[:, i].astype(np.int64) for i in range(3))
    planes = np.stack([green, red - green, blue - green], axis=1)
    planes = np.diff(planes, axis=3, prepend=0)
    return (np.diff(planes, axis=2, prepend=0) % 256).astype(np.uint8)


def test_coded_cifar10(tmp_path: Path) -> None:
    x = pixels(5, 3, 32, 32)
    coded = encode(x)
    before = coded.copy()
    assert np.array_equal(npz.decode(coded), x)
    assert np.array_equal(coded, before)
    parts = {"x_train_coded": coded[:3], "y_train": np.arange(3), "x_test_coded": coded[3:], "y_test": np.arange(2)}
    np.savez(tmp_path / "cifar10_coded.npz", **parts)
    raw = npz.read_coded(tmp_path, CATALOGUE["cifar10"])
    assert raw is not None
    assert np.array_equal(raw.x_train, x[:3])
    assert np.array_equal(raw.x_test, x[3:])
    np.savez(tmp_path / "cifar10_coded.npz", **{**parts, "x_test_coded": coded[3:].transpose(0, 2, 3, 1)})
    with pytest.raises(DataError, match=r"coded pictures are uint8 \(2, 32, 32, 3\)"):
        npz.read_coded(tmp_path, CATALOGUE["cifar10"])


# CIFAR pickles


def python2_pickle(x: np.ndarray, key: bytes, labels: list[int]) -> bytes:
    """A dictionary of an array and a list as Python 2 pickled it: byte strings, numpy.core, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = (
        b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R(" + number(3) + text(b"|") + b"NNN" + number(-1) * 2
    )
    dtype += number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    content = x.tobytes()
    state = b"(" + number(1) + number(x.shape[0]) + number(x.shape[1]) + b"\x86" + dtype + b"\x89"
    state += b"T" + struct.pack("<i", len(content)) + content + b"tb"
    return b"\x80\x02}(" + text(b"data") + array + state + text(key) + b"](" + b"".join(map(number, labels)) + b"eu."


def digest(content: bytes) -> str:
    return "md5:" + hashlib.md5(content).hexdigest()


def batches(contents: dict[str, bytes]) -> pictures.Batches:
    digests = {name: digest(content) for name, content in contents.items()}
    test = {"test_batch": digests.pop("test_batch")}
    return replace(pictures.CIFAR10, train=digests, test=test)


@pytest.fixture
def cifar_files() -> tuple[np.ndarray, dict[str, bytes]]:
    x = pixels(6, 3072)
    return x, {
        "data_batch_1": python2_pickle(x[:2], b"labels", [0, 1]),
        "data_batch_2": pickle.dumps({"data": x[2:4], "labels": [2, 3]}, protocol=4),
        "test_batch": python2_pickle(x[4:], b"labels", [4, 5]),
    }


def put(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_cifar_folder(tmp_path: Path, cifar_files: tuple[np.ndarray, dict[str, bytes]]) -> None:
    x, contents = cifar_files
    folder = put(tmp_path / "cifar-10-batches-py", contents)
    form = pictures.pickled(batches(contents))
    for place in (tmp_path, folder):
        raw = form.read(place, CATALOGUE["cifar10"])
        assert raw is not None
        assert np.array_equal(raw.x_train.reshape(4, -1), x[:4])
        assert raw.y_train.tolist() == [0, 1, 2, 3]
        assert np.array_equal(raw.x_test.reshape(2, -1), x[4:])
    (folder / "data_batch_2").unlink()
    with pytest.raises(DataError, match="data_batch_2 is missing"):
        form.read(tmp_path, CATALOGUE["cifar10"])


def test_cifar_archive(tmp_path: Path, cifar_files: tuple[np.ndarray, dict[str, bytes]]) -> None:
    x, contents = cifar_files
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match=r"its md5 is .*, the original's is c58f30108f718f92721af3b95e74349a"):
        pictures.pickled(batches(contents)).read(tmp_path, CATALOGUE["cifar10"])
    raw = pictures.pickled(replace(batches(contents), digest=digest(buffer.getvalue()))).read(tmp_path, CATALOGUE["cifar10"])
    assert raw is not None
    assert np.array_equal(raw.x_train.reshape(4, -1), x[:4])


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_pickle_with_another_digest_is_not_opened(
    tmp_path: Path, cifar_files: tuple[np.ndarray, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, contents = cifar_files
    form = pictures.pickled(batches(contents))
    put(tmp_path / "cifar-10-batches-py", {**contents, "data_batch_2": pickle.dumps(Bomb(tmp_path / "ran"))})
    opened: list[str] = []
    monkeypatch.setattr(pictures, "unpickle", lambda content, name: opened.append(name) or unpickle(content, name))
    with pytest.raises(DataError, match=r"data_batch_2: its md5 is .* it is not opened"):
        form.read(tmp_path, CATALOGUE["cifar10"])
    assert [name[-12:] for name in opened] == ["data_batch_1"]
    assert not (tmp_path / "ran").exists()


def test_pickle_bomb_does_not_run_even_with_the_right_digest(tmp_path: Path) -> None:
    trigger = tmp_path / "ran"
    for content in (pickle.dumps(Bomb(trigger)), b"cos\nsystem\n(S'touch " + str(trigger).encode() + b"'\ntR."):
        with pytest.raises(DataError, match="only numpy arrays are allowed"):
            unpickle(content, "file")
    assert not trigger.exists()
    for content in (b"", b"garbage", pickle.dumps([1, 2])):
        with pytest.raises(DataError):
            unpickle(content, "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"labels": [0, 1]}, "'data' is not a table"),
        ({"data": np.zeros((2, 3071), np.uint8), "labels": [0, 1]}, "'data' is not a table of 3072 bytes"),
        ({"data": np.zeros((2, 3072)), "labels": [0, 1]}, "'data' is not a table"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", 1]}, "'labels' is not a list of integers"),
    ],
)
def test_cifar_contents(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    contents = {name: pickle.dumps(content, protocol=4) for name in ("data_batch_1", "test_batch")}
    put(tmp_path / "cifar-10-batches-py", contents)
    with pytest.raises(DataError, match=message):
        pictures.pickled(batches(contents)).read(tmp_path, CATALOGUE["cifar10"])


# SVHN


def test_svhn(tmp_path: Path) -> None:
    x = pixels(32, 32, 3, 5)
    info = CATALOGUE["svhn"]
    assert pictures.read_svhn(tmp_path, info) is None
    savemat(tmp_path / "train_32x32.mat", {"X": x, "y": np.array([[1], [10], [9], [2], [10]])})
    with pytest.raises(DataError, match=r"test_32x32.mat is missing"):
        pictures.read_svhn(tmp_path, info)
    savemat(tmp_path / "test_32x32.mat", {"X": x[..., :2], "y": np.array([[3], [4]], np.uint8)})
    raw = pictures.read_svhn(tmp_path, info)
    assert raw is not None
    assert raw.y_train.tolist() == [1, 0, 9, 2, 0]
    assert np.array_equal(raw.x_train[3, 1], x[:, :, 1, 3])
    for content, message in (
        ({"X": x.astype(float), "y": np.ones((5, 1))}, "X is float64"),
        ({"X": x[:31], "y": np.ones((5, 1))}, "X is uint8"),
        ({"X": x, "y": np.zeros((5, 1))}, "labels from 1 to 10"),
        ({"X": x, "y": np.ones((4, 1))}, "expected 5 labels"),
        ({"X": x}, "expected the variables X and y"),
    ):
        savemat(tmp_path / "test_32x32.mat", content)
        with pytest.raises(DataError, match=message):
            pictures.read_svhn(tmp_path, info)
    whole = (tmp_path / "train_32x32.mat").read_bytes()
    for damaged in (b"", b"x" * 300, whole[: len(whole) // 2]):
        (tmp_path / "test_32x32.mat").write_bytes(damaged)
        with pytest.raises(DataError, match="not a readable MATLAB file"):
            pictures.read_svhn(tmp_path, info)


# Tiny ImageNet


TINY = Info("tinyimagenet", "tiny", (3, 64, 64), 2, 0, 0, 0, "here", False, (0.5,) * 3, (0.5,) * 3)


def jpeg(grey: int, side: int = 64, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (side, side), grey if mode == "L" else (grey, grey, grey)).save(buffer, "JPEG")
    return buffer.getvalue()


def tiny_files() -> dict[str, bytes]:
    return {
        "wnids.txt": b"n02\nn01\n",
        "train/n01/images/n01_0.JPEG": jpeg(10),
        "train/n01/images/n01_1.JPEG": jpeg(20, mode="L"),
        "train/n02/images/n02_0.JPEG": jpeg(30),
        "val/images/val_0.JPEG": jpeg(40),
        "val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t63\t63\n",
    }


@pytest.mark.parametrize("zipped", [False, True])
def test_tiny_imagenet(tmp_path: Path, zipped: bool) -> None:
    if zipped:
        with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
            for name, content in tiny_files().items():
                archive.writestr(f"tiny-imagenet-200/{name}", content)
    else:
        put(tmp_path / "tiny-imagenet-200", tiny_files())
    raw = pictures.read_tinyimagenet(tmp_path, TINY)
    assert raw is not None
    assert raw.x_train.shape == (3, 3, 64, 64)
    assert np.abs(raw.x_train[:, :, 5, 5].mean(axis=1) - [10, 20, 30]).max() <= 1
    assert raw.y_train.tolist() == [0, 0, 1]
    assert raw.y_test.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train/n01/images/n01_0.JPEG", b"no picture", "n01_0.JPEG: not a readable picture"),
        ("train/n01/images/n01_0.JPEG", jpeg(10)[:300], "n01_0.JPEG: not a readable picture"),
        ("train/n01/images/n01_0.JPEG", jpeg(10, side=63), "63x63 pixels; expected 64x64"),
        ("train/n09/images/n09_0.JPEG", jpeg(10), "belongs to no class"),
        ("val/val_annotations.txt", b"val_0.JPEG\n", "belongs to no class"),
        ("val/val_annotations.txt", b"val_9.JPEG\tn01\n", "val_9.JPEG is missing"),
        ("wnids.txt", b"n01\n", "names 1 classes; expected 2"),
    ],
)
def test_damaged_tiny_imagenet(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    put(tmp_path / "tiny-imagenet-200", {**tiny_files(), name: content})
    with pytest.raises(DataError, match=message):
        pictures.read_tinyimagenet(tmp_path, TINY)


# UCI HAR


def har_files() -> tuple[dict[str, bytes], np.ndarray]:
    signals = RNG.normal(size=(9, 3, 128)).astype(np.float32)
    files = {}
    for split in ("train", "test"):
        for name, rows in zip(people.SIGNALS, signals, strict=True):
            files[f"{split}/Inertial Signals/{name}_{split}.txt"] = "\n".join(
                " ".join(f"{v:.7e}" for v in row) for row in rows
            ).encode()
        files[f"{split}/y_{split}.txt"] = b"1\n6\n3\n"
        files[f"{split}/subject_{split}.txt"] = b"1\n1\n30\n"
    return files, signals


@pytest.mark.parametrize("form", ["folder", "zip", "zip in zip"])
def test_uci_har(tmp_path: Path, form: str) -> None:
    files, signals = har_files()
    if form == "folder":
        put(tmp_path / "UCI HAR Dataset", files)
    else:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in files.items():
                archive.writestr(f"UCI HAR Dataset/{name}", content)
        if form == "zip":
            (tmp_path / "UCI HAR Dataset.zip").write_bytes(buffer.getvalue())
        else:
            with zipfile.ZipFile(tmp_path / DATA_SETS["uci-har"].files[0].name, "w") as archive:
                archive.writestr("UCI HAR Dataset.zip", buffer.getvalue())
    raw = people.read_ucihar(tmp_path, CATALOGUE["uci-har"])
    assert raw is not None
    assert raw.x_train.shape == (3, 9, 128)
    assert np.abs(raw.x_train - signals.transpose(1, 0, 2)).max() < 1e-6
    assert raw.y_train.tolist() == [0, 5, 2]
    assert raw.users_test is not None
    assert raw.users_test.tolist() == [1, 1, 30]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train/y_train.txt", b"1\n2\n", "different numbers of rows"),
        ("train/y_train.txt", b"1.5\n2\n3\n", "whole numbers"),
        ("train/y_train.txt", b"one\n2\n3\n", "not a table of numbers"),
        ("test/Inertial Signals/body_acc_x_test.txt", b"1 2 3\n1 2 3\n1 2 3\n", "rows of 3 numbers; expected 128"),
    ],
)
def test_damaged_uci_har(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    put(tmp_path / "UCI HAR Dataset", {**har_files()[0], name: content})
    with pytest.raises(DataError, match=message):
        people.read_ucihar(tmp_path, CATALOGUE["uci-har"])


# FEMNIST


def leaf_json(users: dict[str, list[int]]) -> bytes:
    data = {user: {"x": [[1.0 - label / 255] * 784 for label in labels], "y": labels} for user, labels in users.items()}
    return json.dumps({"users": list(users), "num_samples": [len(v) for v in users.values()], "user_data": data}).encode()


def femnist(folder: Path, **files: bytes) -> RawData | None:
    contents = {
        "train/a.json": leaf_json({"w2": [1, 61], "w1": [0]}),
        "train/b.json": leaf_json({"w3": [5]}),
        "test/a.json": leaf_json({"w1": [7]}),
    }
    put(folder / "femnist", {**contents, **{name.replace("_", "/") + ".json": content for name, content in files.items()}})
    return people.read_leaf(folder / "femnist", CATALOGUE["femnist"])


def test_femnist(tmp_path: Path) -> None:
    raw = femnist(tmp_path)
    assert raw is not None
    assert raw.x_train.shape == (4, 1, 28, 28)
    assert raw.x_train[:, 0, 3, 3].tolist() == [254, 194, 255, 250]
    assert raw.y_train.tolist() == [1, 61, 0, 5]
    assert raw.users_train is not None
    assert raw.users_test is not None
    assert raw.users_train.tolist() == [1, 1, 0, 2]
    assert raw.users_test.tolist() == [0]


def test_a_clone_of_leaf_is_a_data_directory(tmp_path: Path) -> None:
    files = {"train/a.json": leaf_json({"w1": [0, 1]}), "test/a.json": leaf_json({"w1": [2]})}
    put(tmp_path / "clone" / "data" / "femnist" / "data", files)
    assert load("femnist", str(tmp_path / "clone"), False).y_train.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[", "not a JSON file of LEAF"),
        (b"{}", "not a JSON file of LEAF"),
        (b'{"users": ["a"], "user_data": {}}', "not a JSON file of LEAF"),
        (b'{"users": ["a"], "user_data": {"a": {"x": [[0.1]], "y": [0]}}}', r"x is \(1, 1\)"),
        (b'{"users": ["a"], "user_data": {"a": {"x": [["q"]], "y": [0]}}}', "not lists of numbers"),
        (leaf_json({"a": [0]}).replace(b"1.0,", b"1.5,"), "between 0 and 1"),
        (leaf_json({"a": [0]}).replace(b"1.0,", b"NaN,"), "between 0 and 1"),
    ],
)
def test_damaged_femnist(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        femnist(tmp_path, train_a=content)


# HARBox


def test_harbox(tmp_path: Path) -> None:
    folder = tmp_path / people.HARBOX_FOLDER
    assert people.read_harbox(tmp_path, CATALOGUE["harbox"]) is None
    windows = RNG.normal(size=(10, 100, 10)).astype(np.float32)
    for person, activity in ((2, "Walk"), (10, "Call")):
        (folder / str(person)).mkdir(parents=True)
        np.savetxt(folder / str(person) / f"{activity}_train.txt", windows.reshape(-1, 10))
    raw = people.read_harbox(tmp_path, CATALOGUE["harbox"])
    assert raw is not None
    assert raw.x_train.shape == (16, 9, 100)
    assert np.allclose(raw.x_train[1, 4], windows[1, :, 5])
    assert np.allclose(raw.x_test[:2], windows[8:, :, 1:].transpose(0, 2, 1))
    assert raw.y_test.tolist() == [3, 3, 0, 0]
    assert raw.users_test is not None
    assert raw.users_test.tolist() == [2, 2, 10, 10]
    (folder / "2" / "Hop_train.txt").write_text("1 2 3\n")
    with pytest.raises(DataError, match="3 numbers; expected windows of 100 x 10"):
        people.read_harbox(tmp_path, CATALOGUE["harbox"])
