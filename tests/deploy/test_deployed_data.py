"""Data on several machines: the server opens its public test file alone, a client its own file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.accounting.types import View
from fedveil.deploy.consent import OwnData
from fedveil.deploy.deployed_data import client_data, public_part
from fedveil.deploy.join import JoinedClient
from fedveil.deploy.offers import offer_bytes, offer_of, read_consent
from fedveil.errors import ConfigError
from fedveil.experiment.config import configure
from fedveil.experiment.rehearsal import rehearsed
from fedveil.experiment.resolve import resolve
from fedveil.experiment.run import run
from fedveil.experiment.sections import EvaluationSection
from fedveil.experiment.verification import verification
from joined_clients import Machines, Nobody, configuration, consent, files, served


def test_nobody_has_all_data_and_the_model_is_that_of_all_together(tmp_path: Path) -> None:
    files(tmp_path)
    inline = run(configuration(tmp_path, "together.csv"), tmp_path / "inline")
    (tmp_path / "together.csv").unlink()
    clients = {c: consent(0, data={"file": str(tmp_path / f"{c}.csv"), "columns": ["a", "b", "ill"]}) for c in range(3)}
    machines = Machines(tmp_path / "clients", clients)
    result, _ = served(configuration(tmp_path, "nowhere.csv"), tmp_path / "server", machines)
    assert result.model.vector.equal(inline.model.vector)
    assert verification(tmp_path / "server").outcome == "verified"
    for path in (tmp_path / "clients").rglob("offer.json"):
        assert str(tmp_path) not in path.read_text()


def test_what_only_all_data_together_could_give_is_refused(tmp_path: Path) -> None:
    files(tmp_path)
    with pytest.raises(ConfigError, match="test_file: missing"):
        public_part(resolve(configuration(tmp_path, "nowhere.csv", test_file=None)))
    whole = configuration(tmp_path, "nowhere.csv")
    public = whole.model_copy(update={"data": whole.data.model_copy(update={"public_fraction": 0.1})})
    with pytest.raises(ConfigError, match="nobody has that"):
        public_part(resolve(public))
    with pytest.raises(ConfigError, match="must be a table"):
        client_data(resolve(configure(data={"name": "digits"})), 0, str(tmp_path / "0.csv"))


def test_weights_that_the_server_cannot_know_are_refused() -> None:
    """The server counts no examples, so that all clients would weigh the same without a word of it."""
    with pytest.raises(ConfigError, match="fedavg: over several machines sites do not reveal their sizes"):
        public_part(resolve(configure(method={"name": "fedavg", "weighting": "examples"})))


def unfit(folder: Path, rows: str, name: str, **changes: Any) -> tuple[Any, list[str], Machines]:
    (folder / "1.csv").write_text(rows)
    clients = {c: consent(0, data={"file": str(folder / f"{c}.csv"), "columns": ["a", "b", "ill"]}) for c in range(3)}
    machines = Machines(folder / f"clients-{name}", clients)
    config = configuration(folder, "nowhere.csv")
    config = config.model_copy(update={k: getattr(config, k).model_copy(update=v) for k, v in changes.items()})
    result, lines = served(config, folder / name, machines)
    return result, lines, machines


EVALUATED = {
    "data": {"client_test_fraction": 0.2},
    "privacy": {"evaluation": EvaluationSection(share=0.1, examples=10)},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ("a,b,secret\n1,2,Smith\n", {}),
        ("a,b,ill\n1,2,7\n", {}),
        ("a,b,ill\n1,2,7\n", {"privacy": {"view": View.AGGREGATE}}),
        ("a,b,ill\n1,,1\n", EVALUATED),
    ],
)
def test_a_client_whose_file_does_not_fit_releases_zero_and_noise_and_nobody_else_hears_of_it(
    rows: str, changes: Any, tmp_path: Path
) -> None:
    """It refused before: the answer to an offer is free and told whether the rows have a value, so that 46 offers read them."""
    files(tmp_path)
    result, lines, machines = unfit(tmp_path, rows, "one", **changes)
    assert [row["participants"] for row in result.history] == [3, 3]
    assert lines == []
    told = {line for line in machines.lines if "not as the configuration says" in line}
    assert len(told) == 1
    other, _, _ = unfit(tmp_path, "nothing\nof it\n", "other", **changes)
    assert other.model.vector.equal(result.model.vector)


@pytest.mark.parametrize("rows", ["a,b,ill\n1,2,1\n", "a,b,ill\n1,2,7\n", "a,b\n", ""])
def test_the_answer_to_an_offer_depends_on_no_row(rows: str, tmp_path: Path) -> None:
    files(tmp_path)
    (tmp_path / "1.csv").write_text(rows)
    offer = offer_of("r", 1, configuration(tmp_path, "nowhere.csv"))
    client = JoinedClient(tmp_path / "client", consent(0, data={"file": str(tmp_path / "1.csv"), "columns": ["a", "b", "ill"]}))
    assert read_consent(client.answer([offer_bytes(offer)]), offer) == ""


def by_record(folder: Path, test_fraction: float = 0.0) -> Any:
    """A run that protects records, by DP-SGD."""
    source = configuration(folder, "nowhere.csv").data.source
    return configure(
        data={"source": source, "client_test_fraction": test_fraction},
        model={"name": "linear"},
        method={"name": "fedavg", "weighting": "uniform"},
        training={"rounds": 1, "local_steps": 1, "batch_size": 40, "local": "dp-sgd", "optimizer": {"name": "sgd", "lr": 1.0}},
        privacy={"noise_multiplier": 1.0, "delta": 1e-5, "view": "server", "unit": "record"},
        run={"seeded_noise": True, "engine": "inline"},
    )


UNFIT = ("1,2,7", "1,,1", "1,2,", "1,tall,0", "nan,2,1", "1e40,2,1", "1,2,0.5", "1,2", "1,2,1,3", "1,\xff,1")


@pytest.mark.parametrize("test_fraction", [0.0, 0.3])
@pytest.mark.parametrize("row", UNFIT)
def test_a_record_that_does_not_fit_keeps_no_other_one_from_training(row: str, test_fraction: float, tmp_path: Path) -> None:
    """It kept all of them from it: a batch was moved by all of its records, and one was charged."""
    files(tmp_path)
    config, file = by_record(tmp_path, test_fraction), tmp_path / "1.csv"
    x, y = client_data(resolve(config), 1, str(file)).clients.examples(1)
    lines, told = file.read_text().splitlines(), list[str]()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"{x[20, 0]:.3f}".rstrip("0") + ","))
    lines[place] = row
    file.write_bytes("\n".join(lines).encode("latin-1"))
    found = client_data(resolve(config), 1, str(file), told.append).clients.examples(1)
    for left, all_of_them in zip(found, (x, y), strict=True):
        assert left.equal(torch.cat([all_of_them[:20], all_of_them[21:]]))
    (line,) = told
    assert line.startswith("1 of 50 rows are not as the configuration says, and take no part; the first: column")


def test_a_record_that_does_not_fit_moves_a_batch_by_one_clip(tmp_path: Path) -> None:
    moved = {}
    for name, row in (("fits", "0.5,-0.5,1"), ("does-not", "0.5,-0.5,7")):
        folder = tmp_path / name
        folder.mkdir()
        files(folder)
        lines = (folder / "1.csv").read_text().splitlines()
        (folder / "1.csv").write_text("\n".join([*lines, row]) + "\n")  # the last, so that all others draw the same coins
        own = {c: {"file": str(folder / f"{c}.csv"), "columns": ["a", "b", "ill"]} for c in range(3)}
        clients = {c: consent(0, unit="record", data=data) for c, data in own.items()}
        result, refused = served(by_record(folder), folder / "server", Machines(folder / "clients", clients))
        assert refused == []
        moved[name] = result.model.vector
    assert 0 < (moved["fits"] - moved["does-not"]).norm() <= 1 / (3 * 40) * 1.001


def test_a_record_that_is_large_keeps_no_other_one_from_training(tmp_path: Path) -> None:
    """Divided by a small constant it was infinite, and the network, tried on a client's own rows, seemed to mix examples."""
    files(tmp_path)
    lines = (tmp_path / "1.csv").read_text().splitlines()
    lines[1] = "3e38,3e38,1"
    (tmp_path / "1.csv").write_text("\n".join(lines) + "\n")
    narrow = configuration(tmp_path, "nowhere.csv", normalise={"a": [0, 0.01]}).data
    for changes, left in (({"data": narrow}, 49), ({"model": configure(model={"name": "mlp"}).model}, 50)):
        config = by_record(tmp_path).model_copy(update=changes)
        made = client_data(resolve(config), 1, str(tmp_path / "1.csv"))
        assert made.clients.size(1) == left
        rehearsed(resolve(config), made, whole=False)


def test_rows_of_parquet_are_read_one_by_one(tmp_path: Path) -> None:
    """Together, a gap makes floats of whole numbers, so that it decided whether another row fits."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, 170 MB")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow, 170 MB")
    files(tmp_path)
    rows = {"a": [1, 2, 2**25 + 1, None], "b": [0.5, 0.5, 0.5, 0.5], "ill": [0, 1, 1, 0]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "1.parquet")
    x, y = client_data(resolve(by_record(tmp_path)), 1, str(tmp_path / "1.parquet")).clients.examples(1)
    assert (x.tolist(), y.tolist()) == ([[1, 0.5], [2, 0.5]], [0, 1])


def test_columns_that_the_consent_does_not_name_are_not_read(tmp_path: Path) -> None:
    files(tmp_path)
    allowed = {0: ["a", "b", "ill"], 1: ["a", "b"], 2: ["a", "ill", "name"]}
    (tmp_path / "1.csv").unlink()  # refused before it is opened
    clients = {c: consent(0, data={"file": str(tmp_path / f"{c}.csv"), "columns": columns}) for c, columns in allowed.items()}
    _, lines = served(configuration(tmp_path, "nowhere.csv"), tmp_path / "server", Machines(tmp_path / "clients", clients))
    refused = "refused to take part: data.source: this client's consent does not allow the columns"
    assert lines == [f"client 1 {refused} ill", f"client 2 {refused} b"]
    with pytest.raises(ValueError, match=r"data\.columns: name the columns"):
        OwnData(file="0.csv")
    with pytest.raises(ValueError, match="leave it out without a file"):
        OwnData(part=0, columns=("a",))


def test_while_nobody_has_joined_the_server_waits(tmp_path: Path) -> None:
    files(tmp_path)
    machines = Machines(tmp_path / "clients", {}, off=set())
    with pytest.raises(Nobody):
        served(configuration(tmp_path, "nowhere.csv"), tmp_path / "server", machines)


def test_a_test_record_that_does_not_fit_lets_no_other_one_be_counted(tmp_path: Path) -> None:
    """Only the first test records count, and one that does not fit keeps its place among them."""
    files(tmp_path)
    whole = by_record(tmp_path, 0.3).model_dump(mode="json", exclude_none=True)
    whole["privacy"]["evaluation"] = {"examples": 5}
    config, file = configure(**whole), tmp_path / "1.csv"
    tests = client_data(resolve(config), 1, str(file)).client_tests
    assert tests is not None
    x = tests.examples(1)[0]
    assert len(x) == 5
    lines = file.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"{x[2, 0]:.3f}".rstrip("0") + ","))
    lines[place] = "1,2,7"
    file.write_text("\n".join(lines))
    changed = client_data(resolve(config), 1, str(file)).client_tests
    assert changed is not None
    assert changed.examples(1)[0].equal(torch.cat([x[:2], x[3:]]))
