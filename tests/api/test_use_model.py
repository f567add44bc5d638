"""A trained model in use: predictions for tables in Python and on the command line, and export."""

from __future__ import annotations

import csv
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli.app import app
from fedveil.errors import ConfigError, DataError

pd = pytest.importorskip("pandas", reason="tables of pandas")
pytestmark = pytest.mark.heavy

ROWS = 400
PUBLIC: dict[str, Any] = {
    "categories": {"sex": ["f", "m"], "ward": [1, 2, 3]},
    "missing": {"age": 50},
    "indicators": ["age"],
    "normalise": {"age": (50, 20)},
    "features": ["sex", "age", "dose", "ward"],
}
TARGETS: dict[str, dict[str, Any]] = {
    "classification": {"target": "stage", "classes": ["low", "middle", "high"]},
    "binary": {"target": "ill", "classes": ["no", "yes"]},
    "multi-label": {"target": ["fever", "cough"], "classes": 0},
    "regression": {"target": "days"},
    "cox": {"target": ["time", "event"], "classes": 0},
    "hazards": {"target": ["time", "event"], "classes": 0},
}
TASK: dict[str, Any] = {
    "regression": fv.Regression(mean=10, scale=4),
    "cox": fv.Survival(),
    "hazards": fv.Survival(likelihood="hazards", edges=(1.0, 2.0)),
}


def patients() -> Any:
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"site": draw.integers(0, 20, ROWS), "sex": draw.choice(["f", "m"], ROWS)})
    table["age"] = draw.normal(50, 20, ROWS)
    table["dose"], table["ward"] = draw.normal(0, 1, ROWS), draw.integers(1, 4, ROWS)
    severe = table.dose + 0.05 * (table.age - 50)
    table["stage"] = np.select([severe < -0.5, severe < 0.5], ["low", "middle"], "high")
    table["ill"] = np.where(severe > 0, "yes", "no")
    table["fever"], table["cough"] = (severe > 0).astype(int), (table.sex == "m").astype(int)
    table["days"], table["time"], table["event"] = 10 + 4 * severe, np.exp(-severe), draw.integers(0, 2, ROWS)
    table.loc[::9, "age"] = np.nan
    return table


def trained(task: str, path: Path) -> fv.Run:
    data = fv.from_frame(patients(), client="site", **TARGETS[task], **PUBLIC)
    federation = fv.Federation(
        model="linear",
        task=TASK.get(task, task),
        method="dp-fedavg",
        training={"rounds": 2},
        privacy={"epsilon": 8, "delta": 1e-2},
    )
    return federation.fit(data, out=path, engine="inline")


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> fv.Run:
    return trained("binary", tmp_path_factory.mktemp("use") / "run")


def by_hand(table: Any) -> np.ndarray[Any, Any]:
    """The encoded table, computed without fedveil."""
    absent = table.age.isna().to_numpy()
    age = (np.where(absent, 50, table.age) - 50) / 20
    wards = [(table.ward == ward).to_numpy() for ward in (1, 2, 3)]
    columns = [table.sex == "f", table.sex == "m", age, absent, table.dose, *wards]
    return np.stack([np.asarray(column, np.float32) for column in columns], axis=1)


@pytest.mark.parametrize("task", TARGETS)
def test_predictions_for_a_table_are_those_of_the_model(task: str, tmp_path: Path) -> None:
    run, table = trained(task, tmp_path / "run"), patients()
    new = table.drop(columns=["site", *([t] if isinstance(t := TARGETS[task]["target"], str) else t)])
    with torch.no_grad():
        output = run.model(torch.from_numpy(by_hand(table)))
    expected = run.trained.task.predictions(output).numpy()
    opened = fv.open_run(tmp_path / "run")
    assert np.allclose(opened.predict(new), expected, atol=1e-5)
    assert isinstance(opened.model, torch.nn.Module)
    new.to_csv(tmp_path / "new.csv", index_label="patient")
    written = tmp_path / "scores.csv"
    asked = ["predict", str(tmp_path / "run"), str(tmp_path / "new.csv"), "--out", str(written), "--copy", "patient"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    with written.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [str(i + 1) for i in range(ROWS)]
    assert [row["patient"] for row in rows] == [str(i) for i in range(ROWS)]
    names = [name for name in rows[0] if name.startswith("prediction")]
    values = [[row[name] for name in names] for row in rows]
    if labels := TARGETS[task].get("classes"):
        assert values == [[labels[int(one)]] for one in expected]
    else:
        assert np.allclose(np.array(values, float).reshape(expected.shape), expected, atol=1e-5)
    chances = [name for name in rows[0] if name.startswith("probability")]
    if chances:
        shares = np.array([[float(row[name]) for name in chances] for row in rows])
        assert np.allclose(shares, opened.probabilities(new), atol=1e-6)
        assert task == "multi-label" or np.allclose(shares.sum(1), 1, atol=1e-5)
    else:
        with pytest.raises(ConfigError, match="has no probabilities"):
            opened.probabilities(new)


def test_regression_answers_in_the_unit_of_the_target(tmp_path: Path) -> None:
    assert 0 < np.median(trained("regression", tmp_path / "run").predict(patients())) < 20


@pytest.mark.parametrize(
    ("column", "values", "rows"),
    [
        ("sex", {3: "x"}, "row 4"),
        ("ward", {3: 7, 8: 9}, "rows 4, 9"),
        ("dose", dict.fromkeys(range(7), np.nan), "rows 1, 2, 3, 4, 5 and 2 more"),
        ("dose", {11: np.inf}, "row 12"),
    ],
)
def test_rows_that_cannot_be_encoded_are_named(column: str, values: dict[int, Any], rows: str, binary: fv.Run) -> None:
    table = patients()
    for row, value in values.items():
        table[column] = table[column].astype(object) if isinstance(value, str) else table[column]
        table.loc[row, column] = value
    with pytest.raises(DataError, match=rf"^{rows} \(the first is 1\) cannot be encoded"):
        binary.predict(table)


def test_rows_of_a_file_that_cannot_be_encoded_are_named_and_nothing_is_written(binary: fv.Run, tmp_path: Path) -> None:
    patients().assign(dose=lambda t: t.dose.astype(object).where(t.index != 5, "1,5 mg")).to_csv(tmp_path / "new.csv")
    with pytest.raises(DataError, match=r"^row 6 \(the first is 1\) cannot be encoded.*column 'dose' holds 1 of 400 values"):
        binary.trained.write_predictions(tmp_path / "new.csv", tmp_path / "scores.csv")
    assert not (tmp_path / "scores.csv").exists()


def test_a_column_that_is_missing_is_named(binary: fv.Run) -> None:
    with pytest.raises(DataError, match="there is no column 'dose'"):
        binary.predict(patients().drop(columns="dose"))


def test_a_configured_table_is_encoded_as_configured(tmp_path: Path) -> None:
    patients().to_csv(tmp_path / "p.csv", index=False)
    source = {"file": str(tmp_path / "p.csv"), "client": "site", "clients": 16, **TARGETS["binary"], **PUBLIC}
    data = fv.from_frame(patients(), client="site", **TARGETS["binary"], **PUBLIC)
    sizes = {"clients": data.info.users, "train_examples": data.info.train_size}
    run = fv.Federation(
        model="linear",
        task="binary",
        method="dp-fedavg",
        training={"rounds": 1},
        data={"source": source | sizes},
        privacy={"epsilon": 8, "delta": 1e-2},
    ).fit(out=tmp_path / "run", engine="inline")
    with torch.no_grad():
        output = run.model(torch.from_numpy(by_hand(patients())))
    assert (run.predict(patients()) == (output.reshape(-1) >= 0).numpy()).all()


def test_a_run_of_arrays_takes_no_table(tmp_path: Path) -> None:
    run = fv.Federation(
        model="linear", data="digits", method="dp-fedavg", training={"rounds": 1}, privacy={"epsilon": 8, "delta": 1e-2}
    ).fit(out=tmp_path / "run", engine="inline")
    with pytest.raises(ConfigError, match="was not trained on a table"):
        run.predict(patients())


def test_the_state_dict_is_the_models(binary: fv.Run, tmp_path: Path) -> None:
    path = binary.export(tmp_path / "model.pt")
    saved = torch.load(path, weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in binary.model.state_dict().items())
    with pytest.raises(ConfigError, match=r"ends in \.pt or \.onnx"):
        binary.export(tmp_path / "model.h5")


WITHOUT_ONNX = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(WITHOUT_ONNX), reason=f"not installed: {', '.join(WITHOUT_ONNX)}")
@pytest.mark.few(2)
@pytest.mark.parametrize("task", ["classification", "binary", "multi-label", "regression", "hazards"])
def test_onnx_gives_the_same_numbers(task: str, tmp_path: Path) -> None:
    import onnxruntime

    run = trained(task, tmp_path / "run")
    session = onnxruntime.InferenceSession(str(run.export(tmp_path / "model.onnx")))
    x = by_hand(patients())
    x[:, 2] = x[:, 2] * 20 + 50  # in the units of the data
    (answer,) = session.run(None, {"examples": x})
    (output,) = session.get_outputs()
    expected = run.probabilities(x) if output.name == "probabilities" else run.predict(x)
    assert np.abs(answer - expected).max() < 1e-5 * max(1, np.abs(expected).max())


def test_without_the_packages_onnx_is_refused(binary: fv.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs onnx and onnxscript: pip install 'fedveil\[onnx\]'"):
        binary.export(tmp_path / "model.onnx")


PAGE = (Path(__file__).parents[2] / "docs" / "use-the-model.md").read_text(encoding="utf-8")


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python and the commands of docs/use-the-model.md, in the order of the page."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for python, command in re.findall(r"```python\n(.*?)```|^    fedveil (.*?)$", PAGE, re.DOTALL | re.MULTILINE):
        if python:
            exec(compile(python, "docs/use-the-model.md", "exec"), names)
        elif not (command.endswith(".onnx") and WITHOUT_ONNX):
            done = CliRunner().invoke(app, shlex.split(command))
            assert done.exit_code == 0, done.output
    assert names["risk"].shape == (3, 2)
    assert (tmp_path / "scores.csv").read_text().startswith("row,patient,prediction,probability no,probability yes\n")
