"""Where data sets are looked for, what is said when they are missing, and what is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedveil.data import catalogue, load
from fedveil.data.catalogue import CATALOGUE, DATA_SETS, Info
from fedveil.data.dataset import Dataset, standardise
from fedveil.data.declared import Remote
from fedveil.data.load import formats
from fedveil.errors import ConfigError, DataError

DATA = os.environ.get("FEDVEIL_DATA")
DOCS = Path(__file__).parents[2] / "docs"
real = pytest.mark.skipif(not DATA, reason="FEDVEIL_DATA does not point to a directory with data sets")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No environment variable, no system copy, an empty cache."""
    monkeypatch.delenv(load.ENVIRONMENT, raising=False)
    monkeypatch.setattr(load, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(catalogue, "cache", lambda info: tmp_path / "cache" / info.name)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST with 6 and 3 examples, as the catalogue sees it."""
    for name in ("mnist", "fashion-mnist"):
        entry = CATALOGUE[name]
        monkeypatch.setitem(
            CATALOGUE,
            name,
            Info(name, "tiny", (1, 28, 28), 10, 6, 3, 0, "here", False, entry.mean, entry.std),
        )


def arrays(fill: int = 7) -> dict[str, np.ndarray]:
    return {
        "x_train": np.full((6, 28, 28, 1), fill, dtype=np.uint8),
        "y_train": np.arange(6, dtype=np.uint8),
        "x_test": np.full((3, 28, 28, 1), fill, dtype=np.uint8),
        "y_test": np.arange(3, dtype=np.uint8),
    }


def write(folder: Path, fill: int = 7, name: str = "mnist.npz", **changes: np.ndarray | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {**arrays(fill), **changes}
    np.savez(folder / name, **{key: value for key, value in content.items() if value is not None})


def test_digits_are_embedded_and_always_the_same() -> None:
    data = load.load("digits", download=False)
    assert data.x_train.shape == (1437, 1, 8, 8)
    assert data.x_test.shape == (360, 1, 8, 8)
    assert (data.x_train.min(), data.x_train.max()) == (0, 255)
    counts = np.bincount(data.y_test, minlength=10)
    whole = counts + np.bincount(data.y_train, minlength=10)
    assert np.abs(counts - whole * 360 / 1797).max() < 1
    again = load.load("digits")
    assert all(np.array_equal(getattr(data, key), getattr(again, key)) for key in ("x_train", "y_train", "x_test", "y_test"))
    everything = np.concatenate([data.x_train, data.x_test]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    ours = sorted(map(bytes, np.rint(everything / (255 / 16)).astype(np.uint8)))
    assert ours == sorted(map(bytes, load_digits().data.astype(np.uint8)))


def test_data_package_does_not_import_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, fedveil.data as d\n"
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(d.__path__, 'fedveil.data.')]\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.name = 'fashon-mnist': unknown data set \(did you mean 'fashion-mnist'\?\); there are digits, mnist",
    ):
        catalogue.info("fashon-mnist")


def test_every_entry_is_complete() -> None:
    for name, entry in CATALOGUE.items():
        assert name == entry.name
        assert len(entry.mean) == len(entry.std) == entry.input_shape[0]
        assert all(std > 0 for std in entry.std)
        assert entry.embedded or (DATA_SETS[name].folders and len(formats(entry)) > 1)
        assert entry.embedded or catalogue.downloadable(name) != bool(DATA_SETS[name].by_hand)


def test_the_documentation_lists_every_entry() -> None:
    lines = [line for line in (DOCS / "data.md").read_text().splitlines() if line.startswith("| ")]
    for name, entry in CATALOGUE.items():
        (line,) = (line for line in lines if line.split()[1] == name)
        sizes = f"{entry.train_size:,} / {entry.test_size:,}" if entry.train_size else "as prepared"
        users = f"{entry.users:,} " if entry.users else ""
        assert line.endswith(f"| {'x'.join(map(str, entry.input_shape))} | {entry.classes} | {sizes} | {users}|")


def test_digests_are_well_formed() -> None:
    lengths = {"md5": 32, "sha256": 64}
    for declared in DATA_SETS.values():
        for file in declared.files:
            algorithm, value = file.digest.split(":")
            assert len(value) == lengths[algorithm]
            int(value, 16)


@pytest.mark.usefixtures("tiny")
def test_order_of_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def first_pixel(data_dir: Path | None = None) -> int:
        return int(load.load("mnist", data_dir, download=False).x_train[0, 0, 0, 0])

    write(tmp_path / "cache" / "mnist", 4)
    assert first_pixel() == 4
    write(tmp_path / "system" / "mnist", 3)
    assert first_pixel() == 3
    write(tmp_path / "env" / "MNIST" / "raw", 2)
    monkeypatch.setenv(load.ENVIRONMENT, str(tmp_path / "env"))
    assert first_pixel() == 2
    write(tmp_path / "given", 1)
    assert first_pixel(tmp_path / "given") == 1
    (tmp_path / "empty").mkdir()
    assert first_pixel(tmp_path / "empty") == 2


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("shape", [(6, 28, 28), (6, 28, 28, 1), (6, 1, 28, 28)])
def test_layouts_of_pictures(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, shape, dtype=np.uint8)
    write(tmp_path, x_train=x)
    data = load.load("mnist", tmp_path)
    assert data.x_train.flags.c_contiguous
    assert np.array_equal(data.x_train, x.reshape(6, 1, 28, 28))
    assert data.y_train.dtype == np.int64


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x_train": np.zeros((5, 28, 28), np.uint8), "y_train": np.zeros(5, np.uint8)},
            "5 train examples; the official split has 6",
        ),
        ({"x_train": np.zeros((6, 27, 28), np.uint8)}, r"examples have shape \(27, 28\); mnist needs \(1, 28, 28\)"),
        ({"x_train": np.zeros((6, 28, 28), np.float32)}, "pictures are float32; expected uint8"),
        ({"y_train": np.full(6, 10, np.uint8)}, "labels go from 10 to 10; expected 0 to 9"),
        ({"y_train": np.full(6, -1, np.int16)}, "labels go from -1"),
        ({"y_train": np.zeros(6)}, "labels are float64; expected integers"),
        ({"y_train": np.zeros(5, np.uint8)}, r"targets are int64 of shape \(5,\)"),
        ({"y_test": None}, "there is no array 'y_test'; it holds x_train, y_train, x_test"),
        ({"x_test": np.array([{}])}, "array 'x_test' cannot be read .*allow_pickle"),
        ({"user_train": np.zeros(4, np.uint8)}, r"users are int64 of shape \(4,\)"),
    ],
)
def test_bad_contents_are_refused(tmp_path: Path, changes: dict[str, np.ndarray | None], message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        load.load("mnist", tmp_path, download=False)


@pytest.mark.usefixtures("tiny")
def test_damaged_npz_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    whole = (tmp_path / "mnist.npz").read_bytes()
    for content in (b"", b"no npz at all", whole[: len(whole) // 2], pickled_bomb(tmp_path)):
        (tmp_path / "mnist.npz").write_bytes(content)
        with pytest.raises(DataError, match="not a readable npz archive"):
            load.load("mnist", tmp_path, download=False)
    assert not (tmp_path / "ran").exists()
    np.save(tmp_path / "mnist.npy", np.zeros(3))
    (tmp_path / "mnist.npy").rename(tmp_path / "mnist.npz")
    with pytest.raises(DataError, match="a single array"):
        load.load("mnist", tmp_path, download=False)


def pickled_bomb(tmp_path: Path) -> bytes:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (tmp_path / "ran",)

    return pickle.dumps(Bomb())


def test_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = CATALOGUE["uci-har"]
    monkeypatch.setitem(
        CATALOGUE, "uci-har", Info("uci-har", "tiny", (9, 128), 6, 4, 2, 3, "here", False, entry.mean, entry.std, 1.0)
    )
    x = np.random.default_rng(0).normal(size=(6, 128, 9)).astype(np.float16)
    y, users = np.arange(6, dtype=np.uint8), np.array([1, 1, 2, 2, 3, 3], np.uint8)
    parts = {
        "x_train": x[:4],
        "x_test": x[4:],
        "y_train": y[:4],
        "y_test": y[4:],
        "user_train": users[:4],
        "user_test": users[4:],
    }
    np.savez(tmp_path / "uci_har.npz", **parts)
    data = load.load("uci-har", tmp_path, download=False)
    assert data.x_train.dtype == np.float32
    assert np.array_equal(data.x_train[1, 3], x[1, :, 3].astype(np.float32))
    assert data.users_train is not None
    assert data.users_train.tolist() == [1, 1, 2, 2]
    assert np.array_equal(data.standardise(data.x_train), data.x_train)
    x[2, 5, 1] = np.nan
    np.savez(tmp_path / "uci_har.npz", **{**parts, "x_train": x[:4]})
    with pytest.raises(DataError, match="1 examples hold NaN or infinite values, the first is 2"):
        load.load("uci-har", tmp_path, download=False)


def test_message_when_there_is_no_copy(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load.load("cifar10", tmp_path, download=False)
    text = str(caught.value)
    for part in (
        f"data directory: {tmp_path}",
        f"system: {tmp_path / 'system'}",
        f"cache: {tmp_path / 'cache' / 'cifar10'}",
        "download: not wanted",
        "cifar10.npz",
        "cifar-10-python.tar.gz",
        "data.data_dir",
        "FEDVEIL_DATA",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ):
        assert part in text


def test_message_when_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import pooch
    import requests

    asked: list[str] = []

    def unreachable(url: str, *args: object, **kwargs: object) -> str:
        asked.append(url)
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(pooch, "retrieve", unreachable)
    with pytest.raises(DataError, match=r"download: failed, .*train-images-idx3-ubyte.gz: no connection"):
        load.load("mnist")
    assert asked == list(DATA_SETS["mnist"].files[0].urls)


@pytest.mark.parametrize("name", [name for name, one in DATA_SETS.items() if one.by_hand])
def test_no_download_without_a_digest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pooch

    monkeypatch.setattr(pooch, "retrieve", lambda *args, **kwargs: pytest.fail("downloaded without a digest"))
    with pytest.raises(DataError, match=r"refused, no digest.*To get it: "):
        load.load(name)


@pytest.mark.usefixtures("tiny")
def test_download_is_checked_kept_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A local server stands for the public place: the digest decides, and the second time nothing is fetched."""
    import threading
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    asked: list[str] = []
    write(tmp_path / "public")
    digest = hashlib.sha256((tmp_path / "public" / "mnist.npz").read_bytes()).hexdigest()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "public"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/"
        published = lambda *remote: replace(DATA_SETS["mnist"], files=(Remote(*remote),))  # noqa: E731
        monkeypatch.setitem(DATA_SETS, "mnist", published("mnist.npz", "md5:" + "0" * 32, (place,)))
        with pytest.raises(DataError, match="the digest does not match, the file was not kept"):
            load.load("mnist")
        assert not (tmp_path / "cache" / "mnist" / "mnist.npz").exists()
        monkeypatch.setitem(DATA_SETS, "mnist", published("mnist.npz", f"sha256:{digest}", (place + "gone/", place)))
        data = load.load("mnist")
        assert data.y_train.tolist() == [0, 1, 2, 3, 4, 5]
        before = len(asked)
        load.load("mnist")
        assert len(asked) == before
        server.shutdown()


@pytest.mark.usefixtures("tiny")
def test_a_download_that_was_broken_off_is_taken_up_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "mnist"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"anything")

    def fetch(info: Info) -> Path:
        write(folder)
        return folder

    monkeypatch.setattr(catalogue, "fetch", fetch)
    assert len(load.load("mnist").x_train) == 6


@pytest.mark.parametrize("variable", [False, True])
def test_directories_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: bool) -> None:
    (tmp_path / "file").write_text("")
    for path, problem in (("missing", "does not exist"), ("file", "is not a directory")):
        if variable:
            monkeypatch.setenv(load.ENVIRONMENT, str(tmp_path / path))
        with pytest.raises(DataError, match=problem):
            load.load("mnist", None if variable else tmp_path / path, download=False)


def test_standardise_by_hand() -> None:
    entry = CATALOGUE["cifar10"]
    x = np.zeros((2, 3, 32, 32), dtype=np.uint8)
    x[1, 2] = 51
    out = standardise(x, entry)
    assert out.dtype == np.float32
    assert out[0, 0, 0, 0] == pytest.approx(-0.4914 / 0.2470, rel=1e-6)
    assert out[1, 2, 4, 4] == pytest.approx((0.2 - 0.4465) / 0.2616, rel=1e-6)
    assert np.array_equal(standardise(x[1], entry), out[1])
    with pytest.raises(DataError, match="cannot standardise"):
        standardise(np.zeros((2, 1, 32, 32), np.uint8), entry)


def test_dataset_refuses_infinite_and_mistyped_values() -> None:
    entry = CATALOGUE["uci-har"]
    x, y = np.zeros((2, 9, 128), np.float32), np.zeros(2, np.int64)
    Dataset(entry, x, y, x, y)
    bad = x.copy()
    bad[1, 0, 0] = np.inf
    for wrong in (
        {"x_test": bad},
        {"x_test": x.astype(np.float64)},
        {"y_test": y.astype(np.int32)},
        {"y_test": y + 6},
        {"x_test": x[:0], "y_test": y[:0]},
        {"users_test": np.zeros(3, np.int64)},
    ):
        with pytest.raises(DataError):
            Dataset(entry, **{"x_train": x, "y_train": y, "x_test": x, "y_test": y, **wrong})  # type: ignore[arg-type]


@pytest.mark.few(2)
@real
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "uci-har"])
@pytest.mark.heavy
def test_real_files(name: str) -> None:
    try:
        data = load.load(name, DATA, download=False)
    except DataError as error:
        if "no copy of" in str(error):
            pytest.skip(f"FEDVEIL_DATA has no {name}")
        raise
    info = data.info
    assert data.x_train.shape == (info.train_size, *info.input_shape)
    assert data.x_test.shape == (info.test_size, *info.input_shape)
    assert set(data.y_train) == set(range(info.classes))
    if info.users:
        assert data.users_train is not None
        assert data.users_test is not None
        assert len(set(data.users_train) | set(data.users_test)) == info.users
        return
    z = data.standardise(data.x_train[:5000])
    axes = (0, 2, 3)
    assert np.abs(z.mean(axis=axes)).max() < 0.05
    assert np.abs(z.std(axis=axes) - 1).max() < 0.05
