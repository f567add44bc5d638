"""Ledgers of releases that would have leaked, written again from end to end: they do not agree with themselves."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from federation_runs import config
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.verification import verification
from fedveil.federation.history import Columns
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.method_registry import METHODS
from fedveil.methods.setting import Setting
from fedveil.release.door import Door
from fedveil.verify import statement_checks, verify_run
from forged_ledger import ForgedLedger
from method_kit import planner
from verified_runs import made, small_run

pytestmark = pytest.mark.heavy
Row = dict[str, Any]
Forge = Callable[[list[Row]], list[Row]]


def scaled(row: Row, column: str, factor: float) -> Row:
    """The row with all numbers of a list multiplied."""
    return {**row, column: json.dumps([factor * number for number in json.loads(row[column])])}


def each(change: Callable[[Row], Row]) -> Forge:
    """The same change of every row."""
    return lambda rows: [change(row) for row in rows]


FORGED: dict[str, tuple[str, Forge]] = {
    "an upload in shares of many": ("server", each(lambda r: {**scaled(r, "noise_std", 1e-3), "participants": 10**6})),
    "shares of more uploads than clients": ("poisson", each(lambda r: {**scaled(r, "noise_std", 1e-3), "participants": 10**6})),
    "half the noise, as if in shares": ("poisson", each(lambda r: scaled(r, "noise_std", 1 / r["participants"] ** 0.5))),
    "a second aggregate": ("poisson", lambda rows: [{**r, "client": client} for r in rows for client in (-1, -2)]),
    "clients that are not there": ("server", lambda rows: [{**r, "client": r["client"] + n} for r in rows for n in (0, 6)]),
    "secret sampling that was not planned": (
        "server",
        each(lambda r: {**r, "event": "sampled_gaussian", "rate": 1e-9, "noise_multiplier": 1 / r["mu"], "mu": None}),
    ),
    "nothing sent": ("server", each(lambda r: {**r, "coordinates": 0, "mu": 0.0})),
    "no noise by the door": ("server", each(lambda r: {**r, "mechanism": "none"})),
    "floats": ("server", each(lambda r: {**r, "grid": None})),
    "chosen from the data": ("adaptive", each(lambda r: {**r, "reads": '["update"]'})),
    "another clip, and its noise": (
        "server",
        each(lambda r: {**scaled(scaled(r, "clip", 7), "noise_std", 7), "whole_clip": 7 * r["whole_clip"]}),
    ),
    "steps of DP-SGD that were none": ("records", each(lambda r: {**r, "note": "DP-SGD", "mu": r["mu"] / 2})),
    "correlated noise that was none": (
        "server",
        each(lambda r: r if r["round"] == 0 else {**scaled(r, "noise_std", 1e-9), "mechanism": "banded", "mu": 0.0}),
    ),
    "an extra without noise": (
        "server",
        each(lambda r: {**r, "extras": '["more"]', "coordinates": r["coordinates"] + 1, "dimension": r["dimension"] + 1}),
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_rows_of_releases_that_would_have_leaked(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    kind, forge = FORGED[name]
    assert forged(made(tmp_path_factory, kind), tmp_path / "run", forge) != 0


@pytest.mark.slow
def test_steps_so_often_that_sums_of_losses_fail(tmp_path: Path) -> None:
    records = {"unit": "record", "delta": 1e-5}
    steps = config({"name": "dp-fedavg"}, "server", training={"local": "dp-sgd"}, privacy=records)
    source = small_run(steps, tmp_path / "source")
    assert verify_run(source).exit_status == 0
    assert forged(source, tmp_path / "run", each(lambda r: {**r, "count": 2**62})) != 0


ONCE: dict[str, dict[str, Any]] = {
    "adaptive-clipping": {},
    "fed-smp": {"variant": "proven"},
    "dp-fedsam": {"rho": 0.1},
    "fedglp-adp": {"variant": "proven"},
}
"""Methods whose noise is added once to a sum, and whose clip and noise follow from what was released."""


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ONCE)
def test_noise_that_is_added_once_is_never_counted_in_shares(method: str, tmp_path: Path) -> None:
    run = small_run(config({"name": method, **ONCE[method]}, "aggregate"), tmp_path / "source")
    assert verify_run(run).exit_status == 0
    clients = json.loads((run / "data.json").read_text())["clients"]
    for participants in (10**6, clients):
        less = 1 / participants**0.5
        change = each(lambda r, less=less, n=participants: {**scaled(r, "noise_std", less), "participants": n})
        assert forged(run, tmp_path / f"run-{participants}", change) == 1


@pytest.mark.parametrize("more", [1, 10**6])
def test_no_sum_has_more_participants_than_clients(more: int, tmp_path: Path) -> None:
    """Nor does noise in shares count for more than took part."""
    training = {"local_steps": 2, "batch_clip": 1.0}
    run = small_run(config({"name": "noisy-fedavg"}, "aggregate", training=training), tmp_path / "source")
    assert verify_run(run).exit_status == 0
    clients = json.loads((run / "data.json").read_text())["clients"]
    forge = each(
        lambda r: {**scaled(r, "noise_std", ((clients - 1) / (clients + more - 1)) ** 0.5), "participants": clients + more}
    )
    assert forged(run, tmp_path / "run", forge) == 1
    assert forged(run, tmp_path / "same-noise", each(lambda r: {**r, "participants": clients + more})) == 1


def test_the_verifier_knows_where_each_built_in_method_adds_its_noise() -> None:
    assert set(statement_checks._BUILT_IN.split()) == set(METHODS)
    for name, variant in product(METHODS, ("published", "proven")):
        try:
            method, s = calibrated_setting(configured(name, variant))
        except ConfigError:  # it has no such variant, or no noise at the door
            continue
        policy = planner(method, s)
        plan = policy.plan(Released(0, torch.zeros(s.layout.dimension), None), policy.start())
        if isinstance(plan, Plan) and torch.as_tensor(plan.noise_std).any():  # of others nothing is proven
            assert (plan.place == "upload") == ((name, variant) in statement_checks._IN_SHARES), (name, variant)


def configured(name: str, variant: str) -> Config:
    """A run of sums with a target, with the variant where the method has them."""
    options = {"separation": 2} if name == "banded-mf" else {}
    own = {"variant": variant} if "variant" in METHODS[name].model_fields else {}
    if not own and variant == "published":
        raise ConfigError("it has no variants")
    training = {"batch_clip": 1.0, "local_steps": 2, "sampling": "fixed", **({"clients_per_round": 3} if options else {})}
    return config({"name": name, **options, **own}, "aggregate", training=training)


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate", "final"])
def test_a_run_that_counts_a_share_which_a_client_knows_is_no_forgery(
    view: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As version 0.2 made it: rows and statement follow, and what they leave out is said, with the number that holds."""
    training = {"local_steps": 2, "batch_clip": 1.0}
    now = config({"name": "noisy-fedavg"}, view, training=training)
    with monkeypatch.context() as before:
        before.setattr(Setting, "unknown_noises_in", lambda s, seen: 1 if seen is View.SERVER else s.cohort - s.colluders)
        before.setattr(Door, "known_noise_terms", property(lambda door: door.colluders))
        run = small_run(now, tmp_path / "old")
    found = verify_run(run)
    assert found.exit_status == 2
    assert [f for f in found.findings if f.kind == "contradicted"] == []
    (said,) = [f.text for f in found.findings if f.kind == "unknown"]
    assert "A-2026-03" in said
    statement = json.loads((run / "statement.json").read_text())
    n, delta = statement["cohort"], statement["delta"]
    right = epsilon_of(statement["views"][1]["mu"] * math.sqrt(n / (n - 1)), delta)
    assert float(re.findall(r"it is ([\d.]+)", said)[0]) == pytest.approx(right, rel=1e-6)
    assert right > 1.02 * statement["views"][1]["proven"]["epsilon"]
    assert verify_run(small_run(now, tmp_path / "new")).exit_status == 0


@pytest.mark.parametrize("factor", [2, 10])
def test_a_run_whose_last_model_is_promised_has_no_more_rows_than_its_sums(factor: int, tmp_path: Path) -> None:
    run = small_run(config({"name": "dp-fedavg"}, "final"), tmp_path / "source")
    assert verify_run(run).exit_status == 0
    assert forged(run, tmp_path / "run", lambda rows: [dict(row) for row in rows for _ in range(factor)]) == 1


def forged(source: Path, run: Path, forge: Forge) -> int:
    """The exit status of verifying a copy with other rows, in which everything that is bound to them is written again."""
    shutil.copytree(source, run)
    ledger = ForgedLedger.read(run)
    ledger.rows = forge(ledger.rows)
    ledger.write(coherent=True)
    return verify_run(run).exit_status


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", ["server", "poisson", "records", "adaptive", "banded"])
@pytest.mark.parametrize(
    ("first", "last", "text"),
    [(0, None, "0.01"), (0, -1, "0.01"), (1, 2, "0.01"), (1, 2, ""), (1, 2, "nan"), (0, None, "")],
    ids=["all rows", "all but the last", "one row", "one row empty", "one row no number", "all rows empty"],
)
def test_the_history_notes_no_less_than_was_spent(
    kind: str, first: int, last: int | None, text: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made(tmp_path_factory, kind), run)
    header, *rows = (run / "history.csv").read_text().splitlines()
    place = header.split(",").index("epsilon_spent")
    cells = [row.split(",") for row in rows]
    for row in cells[first:last]:
        row[place] = text
    (run / "history.csv").write_text("\n".join([header, *map(",".join, cells)]) + "\n")
    bound(run)
    assert [f.subject for f in verify_run(run).findings if f.kind == "contradicted"] == ["epsilon spent in the history"]


def test_the_history_notes_what_was_spent(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path / "run"
    shutil.copytree(made(tmp_path_factory, "server"), run)
    header, *rows = (run / "history.csv").read_text().splitlines()
    place = header.split(",").index("epsilon_spent")
    lines = [[cell for i, cell in enumerate(row.split(",")) if i != place] for row in (header, *rows)]
    (run / "history.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    bound(run)
    assert [f.subject for f in verify_run(run).findings if f.kind == "contradicted"] == ["epsilon spent in the history"]


@pytest.mark.parametrize("file", ["statement.json", "data.json", "versions.json", "summary.json"])
def test_json_with_a_key_twice_is_contradicted(file: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path / "run"
    shutil.copytree(made(tmp_path_factory, "server"), run)
    key = next(iter(json.loads((run / file).read_text())))
    (run / file).write_text(f'{{"{key}": 1,{(run / file).read_text().strip()[1:]}')
    bound(run)
    assert any("stands twice" in finding.text for finding in verify_run(run).findings if finding.kind == "contradicted")


def bound(run: Path) -> None:
    """Write every digest, the chain, the head and the closing again."""
    ledger = ForgedLedger.read(run)
    ledger.bind(run)
    ledger.write(coherent=True)


def rewritten(run: Path, target: Path, change: Callable[[Path], None]) -> int:
    """The outcome for a copy in which files were changed and every digest was made to fit."""
    shutil.copytree(run, target)
    change(target)
    ledger = ForgedLedger.read(target)
    ledger.bind(target)
    ledger.write(coherent=True)
    return verification(target).exit_status


def second_column(name: str) -> Callable[[Path], None]:
    """Give the history a second column, which some readers, and people, take for the other."""

    def change(run: Path) -> None:
        header, *rows = (run / "history.csv").read_text().splitlines()
        lines = [f"{name},{header}", *(f"0.001,{row}" for row in rows)]
        (run / "history.csv").write_text("\n".join(lines) + "\n")

    return change


SECOND = ("epsilon_spent", "test_accuracy ", "TEST_ACCURACY", "test_accuracy\u200b", "\ufefftest_accuracy", "test_\u00a0accuracy")


def declared(columns: object) -> Callable[[Path], None]:
    """Declare other columns."""
    return lambda run: (run / "columns.json").write_text(json.dumps(columns)) and None


RELABELLED = {**asdict(Columns()["update_norm"]), "title": "Proven epsilon"}
DECLARED: dict[str, object] = {"no list": None, "a text": "round", "an object": {}, "no columns": ["round"], "no name": [{}]}


def declared_twice(run: Path) -> None:
    """Give a column two titles, of which some readers take the first."""
    column = json.dumps(asdict(Columns()["update_norm"]))
    (run / "columns.json").write_text(f'[{{"title": "Lies", {column[1:]}]')


def longer_row(run: Path) -> None:
    """Give one row of the history a cell without a column."""
    text = (run / "history.csv").read_text()
    (run / "history.csv").write_text(text.rstrip("\n") + ",0.99\n")


def nothing(run: Path) -> None:
    """Change nothing, so that the forger's tools are known to be honest."""


CHANGES: dict[str, Callable[[Path], None]] = {
    **{ascii(name): second_column(name) for name in SECOND},
    **{name: declared(columns) for name, columns in DECLARED.items()},
    "other words": declared([RELABELLED]),
    "a title twice": declared_twice,
    "a longer row": longer_row,
}


@pytest.mark.parametrize(("change", "status"), [(nothing, 0), *((c, 1) for c in CHANGES.values())], ids=["nothing", *CHANGES])
def test_tables_that_readers_understand_differently_are_contradicted(
    change: Callable[[Path], None], status: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = tmp_path / "source"
    shutil.copytree(made(tmp_path_factory, "adaptive"), source)
    assert rewritten(source, tmp_path / "run", change) == status


def test_no_declaration_changes_the_words_of_a_built_in_column(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shutil.copytree(made(tmp_path_factory, "server"), tmp_path / "run")
    forged = [{"name": "epsilon_spent", "title": "Rounds"}, {"name": "test_accuracy", "title": "Accuracy at ten hospitals"}]
    (tmp_path / "run" / "columns.json").write_text(json.dumps([{**asdict(Columns()[c["name"]]), **c} for c in forged]))
    shown, built_in = read_run(tmp_path / "run").declared, Columns()
    assert [shown[c["name"]].title for c in forged] == [built_in[c["name"]].title for c in forged]


@pytest.mark.parametrize("name", ["ledger.sqlite-journal", "LEDGER.SQLITE-JOURNAL", "Ledger.sqlite", "ledger.SQLITE-wal"])
def test_a_rollback_journal_beside_the_ledger_is_contradicted(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The verifier reads the file as it is; an ordinary reader would first roll back to what the journal holds."""
    run = Path(shutil.copytree(made(tmp_path_factory, "server"), tmp_path / "run"))
    (run / name).write_bytes((run / "ledger.sqlite").read_bytes())
    assert verify_run(run).exit_status == 1
