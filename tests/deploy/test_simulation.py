"""`run.engine = "flower"`: runs in Flower's simulation are runs like others, equal to inline to the bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from federation_runs import config, small_digits
from fedveil.errors import ConfigError
from fedveil.experiment.run import run

METHODS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"name": "dp-fedavg"}, "server", {}),
    ({"name": "dp-fedavg"}, "aggregate", {"training": {"sampling": "poisson"}}),
    ({"name": "fedanc", "variant": "proven"}, "server", {}),
    ({"name": "fedglp-adp", "variant": "proven"}, "server", {}),
    ({"name": "adaptive-clipping"}, "aggregate", {}),
    ({"name": "banded-mf", "separation": 2}, "aggregate", {"data": {"partition": {"kind": "iid", "clients": 12}}}),
]


def test_without_flower_the_engine_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedveil\[train,flower\]'"):
        run(config({"name": "dp-fedavg"}, run={"engine": "flower"}), tmp_path / "out", data=small_digits())


@pytest.mark.parametrize(("begun", "resumed"), [("inline", "flower"), ("flower", "pool")])
def test_a_run_is_not_resumed_where_the_clients_states_are_not(begun: str, resumed: str, tmp_path: Path) -> None:
    from fedveil.experiment.resume import same_run

    saved, now = (config({"name": "dp-fedavg"}, run={"engine": name}) for name in (begun, resumed))
    with pytest.raises(ConfigError, match="with flower the clients keep their own states"):
        same_run(saved, now, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("method", "view", "more"), METHODS)
def test_a_simulated_run_equals_inline_to_the_bit(method: Any, view: str, more: Any, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")
    pytest.importorskip("ray", reason="needs ray (pip install 'fedveil[flower]')")
    results = {}
    for name in ("inline", "flower"):
        results[name] = run(config(method, view, run={"engine": name}, **more), tmp_path / name, data=small_digits())
    assert results["flower"].model.vector.equal(results["inline"].model.vector)
    rows = [json.loads(line) for line in (tmp_path / "flower/checkpoint/journal.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert "train_loss" not in (tmp_path / "flower/private/history.csv").read_text()
    if method["name"] in ("fedanc", "fedglp-adp"):
        assert all(len(list(folder.iterdir())) <= 2 for folder in (tmp_path / "flower/private/clients").iterdir())
