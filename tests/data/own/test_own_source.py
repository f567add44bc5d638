"""Files that a configuration names: read as they are, certified without a look at them, checked against what is said of them."""

from __future__ import annotations

import builtins
import datetime
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import fedveil as fv
from fedveil.data.own.data_source import source_of
from fedveil.errors import ConfigError, DataError, FedveilError
from fedveil.experiment.assembly import prepare
from fedveil.experiment.config import Config, configure
from fedveil.experiment.config_files import load_config
from fedveil.experiment.public_setting import population_of
from fedveil.experiment.resolve import data_spec

TABLE = {
    "target": "cost",
    "client": "patient",
    "features": ["age", "ward"],
    "categories": {"ward": ["01", "02"]},
    "missing": {"age": 40},
    "normalise": {"age": [50, 20]},
    "test": {"share": 0.25},
    "clients": 6,
    "train_examples": 18,
}
HEAD = "patient,age,ward,cost,day,note"


def lines(n: int = 24) -> list[str]:
    return [f'0{i % 6},{"" if i == 3 else 20 + i},0{1 + i % 2},{i * 0.5},2024-01-{1 + i:02},"a, b"' for i in range(n)]


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    file = tmp_path / "visits.csv"
    file.write_text("\n".join([HEAD, *lines()]) + "\n")
    return file


def config(file: Path, **changed: Any) -> Config:
    keys = {key: value for key, value in {"file": str(file), **TABLE, **changed}.items() if value is not None}
    return configure(data={"source": keys}, task="regression", privacy={"delta": 1e-3})


def read(file: Path, **changed: Any) -> Any:
    return prepare(data_spec(config(file, **changed))).dataset


def test_a_csv_is_read_as_the_same_frame_is(visits: Path) -> None:
    found = read(visits)
    rows = [line.split(",") for line in lines()]
    frame = {
        "patient": [row[0] for row in rows],
        "age": [None if row[1] == "" else float(row[1]) for row in rows],
        "ward": [row[2] for row in rows],
        "cost": [float(row[3]) for row in rows],
    }
    keys = {key: value for key, value in TABLE.items() if key not in ("clients", "train_examples")}
    wanted = fv.from_frame(frame, **keys)
    for name in ("x_train", "y_train", "x_test", "y_test", "users_train"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    assert found.info.name == "visits"
    assert found.origin.source == "a table in a file .csv"
    assert found.origin.features == ("age", "ward=01", "ward=02")


def test_clients_and_name_are_those_of_the_source_unless_others_are_configured(visits: Path) -> None:
    own = config(visits)
    assert (own.data.name, own.data.partition) == ("visits", {"kind": "users"})
    assert len(prepare(data_spec(own)).partition) == 6
    keys = {"file": str(visits), **TABLE}
    other = configure(data={"name": "wards", "source": keys, "partition": {"kind": "iid", "clients": 3}}, task="regression")
    assert (other.data.name, len(prepare(data_spec(other)).partition)) == ("wards", 3)
    nobody = config(visits, client=None, clients=None)
    assert nobody.data.partition == {"kind": "iid", "clients": 10}
    assert prepare(data_spec(nobody)).dataset.users_train is None


def test_the_statement_is_made_without_a_look_at_the_file(visits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = population_of(config(visits))
    prepared = prepare(data_spec(config(visits))).population
    assert (before.clients, before.records) == (prepared.clients, prepared.records) == (6, 3)
    assert before.data.input_shape == prepared.data.input_shape == (3,)
    assert before.data.target == prepared.data.target
    assert (before.data.mean, before.data.classes) == (prepared.data.mean, 0)
    monkeypatch.setattr(builtins, "open", None)
    again = config(visits.with_name("elsewhere.csv"))
    assert fv.certify(again).clients == 6


def test_a_statement_of_files_imports_neither_torch_nor_what_reads_them() -> None:
    section = {"file": "x.csv", "target": "y", "client": "p", "features": ["a"], "clients": 9, "train_examples": 90}
    code = (
        f"import sys, fedveil as fv; fv.certify(fv.configure(data={{'source': {section}}}, task='regression')); "
        "print({'torch', 'pandas', 'PIL', 'pyarrow', 'sklearn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_population_agrees_with_the_run_for_every_further_split(visits: Path) -> None:
    for more in ({}, {"client_test_fraction": 0.34}, {"public_fraction": 0.25}, {"partition": {"kind": "iid", "clients": 4}}):
        one = config(visits)
        now = configure(data={"source": {"file": str(visits), **TABLE}, **more}, task="regression")
        assert (population_of(now).clients, population_of(now).records) == (
            prepare(data_spec(now)).population.clients,
            prepare(data_spec(now)).population.records,
        ), (more, one)


def test_the_numbers_must_be_given_and_right(visits: Path) -> None:
    wanted = "give data.source.clients and data.source.train_examples, which are public and decide the noise"
    for lacking in (config(visits, clients=None), config(visits, train_examples=None)):
        for ask in (population_of, lambda c: prepare(data_spec(c))):
            with pytest.raises(ConfigError) as caught:
                ask(lacking)
            assert str(caught.value) == f"{wanted}: here they are clients = 6, train_examples = 18"
    with pytest.raises(ConfigError) as caught:
        population_of(config(visits.with_name("gone.csv"), clients=None))
    gone = f"there is no file {visits.with_name('gone.csv')}: paths are relative to the configuration that names them"
    assert str(caught.value) == f"{wanted}; they cannot be counted here: {gone}"
    with pytest.raises(ConfigError) as caught:
        prepare(data_spec(config(visits, clients=7)))
    assert str(caught.value) == (
        f"data.source says clients = 7, train_examples = 18, and {visits} has clients = 6, train_examples = 18: these public "
        f"numbers decide the noise; correct them, or find out what changed"
    )
    with pytest.raises(ConfigError, match=r"^give data.source.train_examples, which .*: here they are train_examples = 18$"):
        prepare(data_spec(config(visits, client=None, clients=None, train_examples=None)))


def test_paths_are_relative_to_the_configuration(visits: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = visits.with_name("c.toml")
    text = "\n".join(f"{key} = {value!r}" for key, value in TABLE.items() if not isinstance(value, dict))
    tables = "categories = {ward = ['01', '02']}\nmissing = {age = 40}\ntest = {share = 0.25}"
    own.write_text(f"[data.source]\nfile = 'visits.csv'\n{text}\n{tables}\n[task]\nname = 'regression'\n")
    monkeypatch.chdir("/")
    loaded = load_config(own)
    assert loaded.data.source is not None
    assert loaded.data.source.main == visits.resolve()
    assert len(prepare(data_spec(loaded)).dataset.x_train) == 18


def test_a_test_file_and_a_split_by_date(visits: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.tsv"
    other.write_text("cost\tage\tward\n1.5\t30\t01\n")
    data = read(visits, test=None, test_file=str(other), train_examples=24)
    assert (data.x_test.tolist(), data.y_test.tolist()) == ([[30, 1, 0]], [1.5])
    dated = read(visits, test={"latest": "day", "since": "2024-01-19"}, train_examples=18)
    assert sorted(dated.y_test) == [i * 0.5 for i in range(18, 24)]


def test_classes_by_a_list(visits: Path) -> None:
    data = read(visits, target="ward", features=["age"], categories=None, classes=[1, 2])
    assert (data.info.classes, set(data.y_train.tolist())) == (2, {0, 1})


@pytest.mark.parametrize("classes", [["1", "2", "3", "none"], ["0", "1", "2", "3", "none"], ["a", "b", "c", "d", "none"]])
def test_what_a_label_means_does_not_depend_on_the_labels_of_others(classes: list[str], tmp_path: Path) -> None:
    """One text among numbers makes a column of texts: the numbers keep their places, and the card does not tell."""
    found = []
    for odd in ("1", "none"):
        rows = [f"{i % 6},{i},{odd if i == 7 else 1 + i % 3}" for i in range(24)]
        (tmp_path / "stars.csv").write_text("\n".join(["patient,age,stars", *rows]) + "\n")
        keys = {"target": "stars", "features": ["age"], "missing": None, "normalise": None, "categories": None}
        found.append(read(tmp_path / "stars.csv", **keys, classes=classes))
    one, other = found
    assert np.array_equal(one.x_train, other.x_train)
    assert int((one.y_train != other.y_train).sum() + (one.y_test != other.y_test).sum()) == 1
    assert one.origin == other.origin


@pytest.mark.parametrize("classes", [["01", "02", "03", "none"], ["1.0", "2.0", "3.0", "none"], ["a", "b", "c", "d", "none"]])
@pytest.mark.parametrize("form", ["{}", "0{}", "{}.0", "{}e0"])
def test_a_label_is_read_alike_among_numbers_and_texts(classes: list[str], form: str, tmp_path: Path) -> None:
    """Where the list wrote a number in another way, it was one of its labels in a column of texts alone."""
    found = []
    for odd in ("1", "none"):
        rows = [f"{i % 6},{i},{odd if i == 7 else form.format(1 + i % 3)}" for i in range(24)]
        (tmp_path / "stars.csv").write_text("\n".join(["patient,age,stars", *rows]) + "\n")
        keys = {"target": "stars", "features": ["age"], "missing": None, "normalise": None, "categories": None}
        found.append(read(tmp_path / "stars.csv", **keys, classes=classes))
    one, other = found
    assert int((one.y_train != other.y_train).sum() + (one.y_test != other.y_test).sum()) == 1


@pytest.mark.parametrize("classes", [["1", "01", "none"], ["1", "1.0", "none"], ["0", "-0", "none"], [1, "1e0", "none"]])
def test_labels_that_a_column_of_numbers_cannot_tell_apart_are_refused(classes: list[str], visits: Path) -> None:
    """With a text among them they were two labels, and without it one: one record decided about all others."""
    with pytest.raises(ConfigError, match=r"names a label twice: give each once; a column of numbers holds"):
        read(visits, target="ward", features=["age"], categories=None, classes=classes)


def test_parquet(visits: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, 170 MB")
    write_table = pytest.importorskip("pyarrow.parquet").write_table

    rows = [line.split(",") for line in lines()]
    ages = [None if row[1] == "" else int(row[1]) for row in rows]
    columns = {"patient": [row[0] for row in rows], "age": ages, "ward": [row[2] for row in rows]}
    file = tmp_path / "visits.parquet"
    write_table(pyarrow.table({**columns, "cost": [float(row[3]) for row in rows]}), file)
    wanted, found = read(visits), read(file)
    assert np.array_equal(found.x_train, wanted.x_train)
    assert found.origin.casts == ("age: numbers -> float32", "targets float64 -> float32")
    with pytest.raises(DataError, match=r"visits.parquet has no column 'cots'; it has patient, age, ward, cost"):
        read(file, target="cots")
    file.write_bytes(b"no")
    with pytest.raises(DataError, match=r"visits.parquet cannot be read as Parquet: "):
        read(file)


def test_parquet_needs_an_extra(visits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = visits.rename(visits.with_suffix(".parquet"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError) as caught:
        read(file)
    assert str(caught.value) == f"{file}: reading Parquet needs pyarrow: pip install 'fedveil[parquet]'"


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (HEAD, "{} has no rows below its header: the first line names the columns"),
        (f"{HEAD}\n1,2,3\n", "{}: row 1 has 3 values for 6 columns: quote values that hold commas"),
        ("patient,age,ward\na,1,01\n", "{} has no column 'cost'; it has patient, age, ward"),
        ("patient,age,age,ward,cost\na,1,1,01,2\n", "{} has more than one column 'age'; it has patient, age, age, ward, cost"),
        (
            "patient,age,ward,cost\na,old,01,2\n",
            "column 'age' holds text: list all values that it can have in categories={{'age': [...]}}, or leave it out of "
            "features",
        ),
        (
            "patient;age;ward;cost\na;1;01;2\n",
            "{} has no column 'age'; it has patient;age;ward;cost: values seem to be separated by ';': save it as .csv with "
            "commas, and numbers with a point, or as .tsv with tabs",
        ),
        (
            "patient, age,ward,cost\na,1,01,2\n",
            "{} has no column 'age'; it has patient,  age, ward, cost: the header has blanks around it (' age'): take them out",
        ),
        (
            "patient,age,ward,cost\na,1_000,01,2\na,7,01,2\n",
            "column 'age' holds 1 of 2 values that are no numbers, which are written as 1234.5: correct them, or leave them "
            "empty and give a public constant, missing={{'age': ...}}; numbers that are names need categories={{'age': [...]}}",
        ),
        (
            'patient,age,ward,cost\na,1,01,2\na,7,01,"2\n',
            "{} cannot be read as a table in UTF-8, row 2: unexpected end of data",
        ),
        (
            "patient,age,ward,cost\na,1,01,2\0\n",
            "{} is no table in UTF-8: it holds zero bytes, as a damaged file does, or one in UTF-16: save it as CSV in UTF-8",
        ),
        ("patient,age,ward,cost\n,1,01,2\n", "column 'patient' has 1 missing value, and it is the client: leave these rows out"),
    ],
)
def test_bad_files(content: str, wanted: str, visits: Path) -> None:
    visits.write_text(content)
    with pytest.raises(DataError) as caught:
        read(visits)
    assert str(caught.value) == wanted.format(visits)


def test_files_that_are_none(visits: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b"\xff\xfe\xfa,a\n1,2\n")
    for name, wanted in (
        ("visits.xlsx", "{}: a table ends in .csv, .tsv, .parquet: save it as one of them"),
        ("gone.csv", "there is no file {}: paths are relative to the configuration that names them"),
    ):
        with pytest.raises(DataError) as caught:
            read(tmp_path / name)
        assert str(caught.value) == wanted.format(tmp_path / name)
    (tmp_path / "round.csv").symlink_to("round.csv")
    with pytest.raises(DataError, match=r"round.csv is a link that leads to no file"):
        read(tmp_path / "round.csv")
    with pytest.raises(DataError, match=r"latin.csv cannot be read as a table in UTF-8: "):
        read(tmp_path / "latin.csv")


def grey(width: int, height: int) -> bytes:
    """A PNG of that size without any pixels."""
    parts = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), b"IDAT": zlib.compress(b"")}
    chunks = [struct.pack(">I", len(one)) + name + one + struct.pack(">I", zlib.crc32(name + one)) for name, one in parts.items()]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_a_picture_of_any_size_is_refused_in_a_line(side: int, photos: Path) -> None:
    """Pillow warns of 100 megapixels, and refuses 400."""
    (photos / "person0" / "dog" / "large.png").write_bytes(grey(side, side))
    wanted = r"large.png (is 10000x10000 in mode L|cannot be read as a picture: Image size \(400000000 pixels\))"
    with pytest.raises(DataError, match=wanted):
        prepare(data_spec(images(photos)))


def test_a_file_of_zero_bytes_is_not_read_as_a_whole(visits: Path) -> None:
    """One line of 6 GB, of which the first 16 million characters are looked at."""
    os.truncate(visits, 6 * 2**30)
    tracemalloc.start()
    with pytest.raises(DataError, match="it holds zero bytes"):
        read(visits)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**28


DAY = datetime.datetime(2024, 1, 1)
ALIKE: dict[str, tuple[list[Any], dict[str, Any], Any]] = {
    "whole numbers": (list(range(24)), {}, list(range(24))),
    "times": ([1_700_000_000 + i for i in range(24)], {}, "holds whole numbers beyond 16777216"),
    "times, one missing": ([None, *(1_700_000_000 + i for i in range(23))], {"missing": {"v": 0}}, "holds whole numbers beyond"),
    "accounts": ([10**18 + i for i in range(24)], {}, "holds whole numbers beyond 16777216"),
    "times of which nothing is lost": ([1_700_000_000 + 128 * i for i in range(24)], {}, [1.7e9 + 128 * i for i in range(24)]),
    "accounts, two of which are one float": ([2**53 + i % 2 for i in range(24)], {}, "holds whole numbers beyond 16777216"),
    "long accounts": ([10**30 + i for i in range(24)], {}, "holds whole numbers beyond 18446744073709551616, which no float"),
    "one long account": ([*range(23), -(10**30)], {}, "holds whole numbers beyond 18446744073709551616, which no float"),
    "large floats": ([1.5e30 * i for i in range(24)], {}, [np.float32(1.5e30 * i) for i in range(24)]),
    "never measured": ([None] * 24, {"missing": {"v": 7}}, [7] * 24),
    "never measured, unsaid": ([None] * 24, {}, "'v' has 24 missing values"),
    "truths": ([i % 2 == 0 for i in range(24)], {}, [1, 0] * 12),
    "decimals": ([Decimal(i) / 4 for i in range(24)], {}, [i / 4 for i in range(24)]),
    "one text": (["n/a", *map(str, range(23))], {}, "holds 1 of 24 values that are no numbers"),
    "thousands": ([f"1,{i:03}" for i in range(24)], {}, "holds 24 of 24 values that are no numbers"),
    "dates": ([DAY + datetime.timedelta(i) for i in range(24)], {}, "holds dates: give a number"),
    "names": (["east", "west"] * 12, {}, "holds text: list all values"),
    "categories": (["I", None, "II"] * 8, {"categories": {"v": ["I", "II"]}, "missing": {"v": "II"}}, [1, 0, 0] * 8),
}
FORMATS = ("frame", "dict", "csv", "tsv", "parquet", "arrow")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ALIKE)
def test_one_table_has_one_answer_in_every_format(name: str, form: str, tmp_path: Path) -> None:
    values, keys, wanted = ALIKE[name]
    columns = {"who": ["NA", "a", "b"] * 8, "v": values, "y": [i * 0.5 for i in range(24)]}
    frame, card = pd.DataFrame(columns), {"target": "y", "client": "who", "features": ["v"], "test": {"share": 0.25}, **keys}
    file = tmp_path / f"t.{form}"
    if form in ("parquet", "arrow"):
        pytest.importorskip("pyarrow", reason="needs pyarrow")

    def found() -> Any:
        if form in ("csv", "tsv"):
            frame.to_csv(file, index=False, sep="," if form == "csv" else "\t")
        elif form == "parquet":
            frame.to_parquet(file)
        if form in ("csv", "tsv", "parquet"):
            source = source_of({"file": str(file), **card})
            assert source is not None
            return source.examples("t")
        return fv.from_frame(columns if form == "dict" else frame if form == "frame" else arrow(frame), **card)

    if isinstance(wanted, str):
        with pytest.raises(DataError, match=wanted):
            found()
        return
    data = found()
    both = np.column_stack([np.concatenate([data.x_train, data.x_test])[:, 0], np.concatenate([data.y_train, data.y_test])])
    assert both[both[:, 1].argsort()][:, 0].tolist() == wanted
    assert data.info.users == 3, "NA is a name"


def arrow(frame: pd.DataFrame) -> Any:
    import pyarrow

    return pyarrow.Table.from_pandas(frame)


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ("visits.csv", "data.source = 'visits.csv': give `file`, the path of a CSV or Parquet table, or `images`, that of"),
        ({"target": "a"}, "data.source = {'target': 'a'}: give `file`"),
        ({"file": "a.csv", "name": "a"}, "data.source.name = 'a': the name of the data is data.name"),
        ({"file": "a.csv", "target": "a"}, "data.source.features: missing; it must be given"),
        (
            {"file": "a.csv", "target": "a", "features": ["b"], "feature": 1},
            "data.source.feature = 1: unknown key (did you mean 'features'?)",
        ),
        ({"file": "a.csv", "target": "a", "features": ["b"], "test": "x"}, "test = 'x': give 0.2 or"),
        (
            {"images": "a", "shape": [1, 8, 8], "classes": ["a", "b"], "labels": ["client"]},
            "data.source.labels = ['client']: give",
        ),
        (
            {"images": "a", "shape": [8, 8, 3], "classes": ["a", "b"]},
            "data.source.shape = [8, 8, 3]: give (channels, height, width), as [3, 8, 8] is",
        ),
        ({"file": "C:\temp\new.csv", "target": "a", "features": ["b"]}, "'C:\\temp\\new.csv' is no path: in double quotes TOML"),
        (
            {"file": "~nobody-of-that-name/a.csv", "target": "a", "features": ["b"]},
            "~nobody-of-that-name/a.csv: Could not",
        ),
        ({"images": "a", "shape": [1, 8, 8], "classes": ["a"]}, "data.source.classes = ['a'] is not possible"),
    ],
    ids=str,
)
def test_impossible_sections(section: Any, wanted: str) -> None:
    with pytest.raises(FedveilError) as caught:
        configure(data={"source": section})
    assert str(caught.value).startswith(wanted)


def test_the_names_of_the_catalogue_are_taken(visits: Path) -> None:
    digits = visits.rename(visits.with_name("digits.csv"))
    with pytest.raises(ConfigError) as caught:
        config(digits)
    assert str(caught.value) == "data.name = 'digits' is a data set of fedveil, and data.source is another: choose another name"
    odd = digits.rename(digits.with_name("my visits (1).csv"))
    assert config(odd).data.name == "my-visits-1-"


def picture(file: Path, value: int, mode: str = "L", size: tuple[int, int] = (6, 4)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16") else (value,) * len(mode)).save(file)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i in range(12):
        picture(tmp_path / "photos" / f"person{i % 3}" / ("cat" if i % 2 else "dog") / f"{i}.png", i)
    return tmp_path / "photos"


def images(folder: Path, **changed: Any) -> Config:
    keys = {"images": str(folder), "shape": [1, 4, 6], "classes": ["cat", "dog"], "labels": ["client", "class"]}
    counts = {"test": {"share": 0.25}, "clients": 3, "train_examples": 9}
    return configure(data={"source": {**keys, **counts, **changed}})


def test_pictures_in_folders_of_clients_and_classes(photos: Path) -> None:
    data = prepare(data_spec(images(photos))).dataset
    assert (data.info.name, data.info.input_shape, data.info.classes, data.info.users) == ("photos", (1, 4, 6), 2, 3)
    for x, y in zip((*data.x_train, *data.x_test), (*data.y_train, *data.y_test), strict=True):
        assert (x == x[0, 0, 0]).all()
        assert int(y) == (int(x[0, 0, 0]) + 1) % 2
    assert data.users_train is not None
    assert data.users_train.tolist() == (data.x_train[:, 0, 0, 0] % 3).tolist()
    assert population_of(images(photos)).data.input_shape == (1, 4, 6)
    assert (data.info.mean, data.info.std) == ((0.5,), (0.5,))


def test_grey_pictures_become_colour_and_nothing_else_is_converted(photos: Path) -> None:
    picture(photos / "person0" / "dog" / "more.png", 40, "RGB")
    data = prepare(data_spec(images(photos, shape=[3, 4, 6], train_examples=10, mean=[0.1, 0.2, 0.3]))).dataset
    assert data.info.input_shape == (3, 4, 6)
    assert data.info.mean == (0.1, 0.2, 0.3)
    with pytest.raises(DataError) as caught:
        prepare(data_spec(images(photos)))
    file = photos / "person0" / "dog" / "more.png"
    fix = "convert and resize the pictures to one shape first"
    assert str(caught.value) == f"{file} is 4x6 in mode RGB, and data.source.shape = [1, 4, 6]: {fix}"
    picture(file, 1, "L", (5, 4))
    with pytest.raises(DataError) as caught:
        prepare(data_spec(images(photos)))
    assert str(caught.value) == f"{file} is 4x5 in mode L, and data.source.shape = [1, 4, 6]: {fix}"
    file.write_text("no picture")
    with pytest.raises(DataError, match=r"more.png cannot be read as a picture: "):
        prepare(data_spec(images(photos)))


def test_pictures_that_a_table_lists(photos: Path, tmp_path: Path) -> None:
    wanted = prepare(data_spec(images(photos))).dataset
    flat, table = tmp_path / "flat", tmp_path / "labels.csv"
    flat.mkdir()
    rows = ["file,class,client"]
    for file in sorted(photos.rglob("*.png")):
        shutil.copy(file, flat / file.name)
        rows.append(f"{file.name},{file.parent.name},{file.parent.parent.name}")
    table.write_text("\n".join(rows))
    data = prepare(data_spec(images(flat, table=str(table)))).dataset
    assert np.array_equal(data.x_train, wanted.x_train)
    assert np.array_equal(data.users_train, wanted.users_train)
    nobody = {"labels": ["class"], "clients": None, "table": str(table)}
    with_three = images(flat, **nobody).data.model_copy(update={"partition": {"kind": "iid", "clients": 3}})
    assert prepare(data_spec(images(flat, **nobody).model_copy(update={"data": with_three}))).dataset.users_train is None
    table.write_text("file,class,client\n0.png,dog,\n")
    with pytest.raises(DataError) as caught:
        prepare(data_spec(images(flat, table=str(table))))
    assert str(caught.value) == "column 'client' has 1 missing value, and it is the client of labels.csv: leave these rows out"


def test_pictures_for_testing(photos: Path) -> None:
    data = prepare(data_spec(images(photos, test_images=str(photos), test=None, train_examples=12))).dataset
    assert (len(data.x_train), len(data.x_test)) == (12, 12)


def test_folders_that_are_none(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    stray = photos / "stray.png"
    for folder, wanted in (
        (tmp_path / "gone", "there is no folder {}: paths are relative to the configuration that names them"),
        (tmp_path / "empty", "{} holds no pictures: they end in .png, .jpg, .jpeg, .bmp, .tif, .tiff, .webp"),
    ):
        with pytest.raises(DataError) as caught:
            prepare(data_spec(images(folder)))
        assert str(caught.value) == wanted.format(folder)
    picture(stray, 1)
    with pytest.raises(DataError) as caught:
        prepare(data_spec(images(photos)))
    assert str(caught.value) == f"{stray} does not lie in {photos}/CLIENT/CLASS/: move it, or correct data.source.labels"
    stray.unlink()
    stray = photos / "person0" / "dog" / "round.png"
    stray.symlink_to("round.png")
    with pytest.raises(DataError, match=r"round.png cannot be read as a picture: "):
        prepare(data_spec(images(photos)))
    stray.unlink()
    (photos / "person0" / "dog").rename(photos / "person0" / "fox")
    with pytest.raises(DataError, match=r"^y holds 1 label that classes does not list \(cat, dog\)"):
        prepare(data_spec(images(photos)))


def test_a_source_is_itself() -> None:
    source = source_of({"file": "a.csv", "target": "b", "features": ["c"]})
    assert source_of(source) is source
    assert source_of(None) is None
