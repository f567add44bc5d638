"""Runs of one's own model, whole and in parts: the same on every engine, read without its code, resumed only with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedveil as fv
from federation_runs import small_digits
from fedveil.attacks.attack_options import AttackOptions
from fedveil.attacks.attack_run import attack
from fedveil.attacks.audit_run import audit_run
from fedveil.attacks.replay import replay
from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import load_config, load_recorded
from fedveil.experiment.data_card import HandedOver, how_to_resume
from fedveil.experiment.recertify import recertify
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.resolve import resolve
from fedveil.experiment.result import Result
from fedveil.ledger.ledger import Ledger
from fedveil.studies.cell import Cell
from fedveil.studies.grid import run_grid

ROOT = Path(__file__).parents[2]


class Reader(nn.Module):
    """Rows of a digit as words: attention over them, weights shared by two layers, a constant encoding, dropout where told."""

    def __init__(self, dropout: float = 0.0, outputs: int = 10) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(-1, 1, 64).reshape(8, 8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.second(torch.tanh(self.first(x.squeeze(1) + self.positions))))
        out: Tensor = self.head(self.attention(rows).mean(1))
        return out


HEAD = 8 * 10 + 10


def reader(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return Reader(dropout)


def config(model: Any, engine: str = "inline", **sections: Any) -> Config:
    """Six clients, three a round, two rounds."""
    chosen: dict[str, Any] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}},
        "method": {"name": "dp-fedavg"},
        "training": {"rounds": 2, "clients_per_round": 3, "local_steps": 2, "batch_size": 16, "sampling": "fixed"},
        "privacy": {"epsilon": 8.0, "delta": 1e-2},
        "run": {"seeded_noise": True, "seed": 3, "engine": engine},
    }
    for name, keys in sections.items():
        chosen[name] = {**chosen[name], **keys}
    return fv.configure(model=model, **chosen)


def trained(configuration: Config, path: Path, **more: Any) -> Result:
    return fv.train(configuration, path, data=small_digits(), **more)


def saved(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


PARTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "head": {"trainable": ["head.*"]},
    "lora": {"lora": {"rank": 2, "targets": ["*.linear?", "second"]}, "trainable": ["head.*"]},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", ["lora", "head", "whole"])
def test_engines_agree(parts: str, tmp_path: Path) -> None:
    for engine in ("inline", "pool", "batched"):
        trained(config({"module": reader(), **PARTS[parts]}, engine), tmp_path / engine)
    inline, pool, batched = (saved(tmp_path / engine) for engine in ("inline", "pool", "batched"))
    assert list(inline) == list(pool) == list(batched)
    assert all(torch.equal(inline[name], pool[name]) for name in inline)
    assert all(torch.allclose(inline[name], batched[name], atol=1e-4) for name in inline)


def test_dropout_comes_from_the_seed_on_every_worker(tmp_path: Path) -> None:
    for engine, name in (("inline", "a"), ("pool", "b"), ("batched", "c"), ("batched", "d")):
        torch.manual_seed(len(name) + ord(name))
        trained(config(reader(0.4), engine), tmp_path / name)
    a, b, c, d = (saved(tmp_path / name) for name in "abcd")
    assert all(torch.equal(a[name], b[name]) and torch.equal(c[name], d[name]) for name in a)


def test_the_dimension_is_that_of_what_is_trained(tmp_path: Path) -> None:
    module = reader()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = trained(config({"module": module, "trainable": ["head.*"]}), tmp_path / "run")
    assert result.privacy.dimension == result.model.layout.dimension == HEAD
    assert saved(tmp_path / "run").keys() == {"head.weight", "head.bias"}
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert {(e.dimension, e.coordinates) for _, _, e in ledger.entries()} == {(HEAD, HEAD)}
    assert {row["uplink_bytes"] for row in result.history} == {3 * HEAD * 4}
    layers = read_run(tmp_path / "run").layers
    assert {row["layer"] for row in layers} == {"head.weight", "head.bias"}
    frozen = {name for name in before if not name.startswith("head")}
    after = result.model.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items()), "the caller's stays as it is"


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_smaller_part_has_less_noise_at_the_same_price(view: str, tmp_path: Path) -> None:
    norms = {}
    for name, parts in (("whole", {}), ("head", PARTS["head"])):
        configuration = config({"module": reader(), **parts}, training={"optimizer": {"lr": 1e-9}}, privacy={"view": view})
        result = trained(configuration, tmp_path / name)
        start, end = configuration.model.source.state_dict(), saved(tmp_path / name)
        norms[name] = sum(float((end[k] - start[k]).square().sum()) for k in end), result.model.layout.dimension, result.privacy
    (whole, d, one), (head, h, two) = norms["whole"], norms["head"]
    assert one.noise_multiplier == two.noise_multiplier
    assert 0.6 < (head / h) / (whole / d) < 1.6, "noise of the same size on each coordinate that is sent"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from fedveil.experiment.config_files import load_config
from fedveil.experiment.recertify import recertify
run = Path(sys.argv[1])
print(load_config(run / "config.toml").model.recorded.kind)
print([str(finding) for finding in recertify(run)])
"""


def test_the_directory_is_read_without_torch_and_without_the_code(tmp_path: Path) -> None:
    trained(config({"module": reader(), "trainable": ["head.*"]}), tmp_path / "run")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].endswith(".Reader")
    assert "verified" in done.stdout
    assert fv.verification(tmp_path / "run").outcome == "verified"
    assert read_run(tmp_path / "run").handed_over


def test_what_is_taken_for_public_is_in_the_statement(tmp_path: Path) -> None:
    save_file({k: v for k, v in reader().state_dict().items() if k != "second.weight"}, tmp_path / "public.safetensors")
    model = {"module": Reader, "weights": str(tmp_path / "public.safetensors"), "trainable": ["head.*"]}
    result = trained(config(model), tmp_path / "run")
    texts = " ".join(a.what for a in result.privacy.assumptions)
    digest = load_recorded(tmp_path / "run").model.recorded.weights  # type: ignore[union-attr]
    assert f"the values in model.weights (SHA-256 {digest}) are public and were not trained on the clients' data" in texts
    assert "the initial and frozen parameters of the model handed over are public" in texts
    initial = load_recorded(tmp_path / "run").model.recorded.initial  # type: ignore[union-attr]
    assert len(initial) == 64
    assert f"(SHA-256 of the initial ones: {initial})" in texts
    assert [f.kind for f in recertify(tmp_path / "run")] == ["verified"]
    assert not any("model" in a.what for a in trained(config("linear"), tmp_path / "plain").privacy.assumptions)


def killed(configuration: Config, path: Path, after: int = 0) -> None:
    def stop(record: Any) -> None:
        if record["round"] == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        trained(configuration, path, on_round=stop)
    assert "fv.load_config(" in str(caught.value.__notes__)


def test_a_killed_run_goes_on_with_the_module_alone(tmp_path: Path) -> None:
    model = {"module": reader(0.2), "trainable": ["head.*", "attention.norm?.*"]}
    trained(config(model), tmp_path / "calm")
    killed(config(model), tmp_path / "run")
    recorded = tmp_path / "run" / "config.toml"
    with pytest.raises(ConfigError, match=r"a program handed the model \(.*Reader\) over.*fv\.load_config"):
        trained(load_config(recorded), tmp_path / "run", resume=True)
    other = reader(0.2)
    with torch.no_grad():
        other.first.weight.add_(1e-6)
    with pytest.raises(ConfigError, match=r"the frozen part of .*Reader has SHA-256"):
        trained(load_config(recorded, model=other), tmp_path / "run", resume=True)
    other = reader(0.2)
    with torch.no_grad():
        other.head.weight.add_(1e-6)
    with pytest.raises(ConfigError, match=r"the initial parameters of .*Reader have SHA-256 .* is recorded"):
        trained(load_config(recorded, model=other), tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=r"trained parameters of .*Linear are not those recorded|matches nothing"):
        trained(load_config(recorded, model=nn.Linear(8, 10)), tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=r"model\.trainable was .* and is"):
        trained(config({**model, "trainable": ["head.*"]}), tmp_path / "run", resume=True)
    trained(load_config(recorded, model=reader(0.2)), tmp_path / "run", resume=True)
    calm, again = saved(tmp_path / "calm"), saved(tmp_path / "run")
    assert all(torch.equal(calm[name], again[name]) for name in calm)
    assert fv.verification(tmp_path / "run").outcome == "verified"


def test_the_same_configuration_resumes_as_well(tmp_path: Path) -> None:
    model = {"module": Reader, "trainable": ["head.*"]}
    killed(config(model), tmp_path / "run")
    trained(config(model), tmp_path / "run", resume=True)
    assert fv.verification(tmp_path / "run").outcome == "verified"


def test_an_audit_asks_for_the_module_where_it_trains(tmp_path: Path) -> None:
    trained(config({"module": reader(), "trainable": ["head.*"]}, training={"rounds": 1}), tmp_path / "run")
    data = small_digits()
    with pytest.raises(ConfigError, match="hand it over again in Python"):
        audit_run(tmp_path / "run", n=50, canaries=2, handed_over=HandedOver(data=data))
    audit_run(tmp_path / "run", n=50, canaries=2, handed_over=HandedOver(data=data, model=reader()))


NET = """
from torch import nn


def net(hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
"""

TOML = """
[data]
name = "digits"
partition = { kind = "iid", clients = 6 }
[model]
name = "net_of_this_test.py:net"
hidden = 4
trainable = ["3.*"]
[method]
name = "dp-fedavg"
[training]
rounds = 2
clients_per_round = 4
[privacy]
epsilon = 8.0
delta = 1e-2
[run]
engine = "inline"
"""


@pytest.fixture
def net_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "net_of_this_test", raising=False)
    (tmp_path / "net_of_this_test.py").write_text(NET)
    (tmp_path / "c.toml").write_text(TOML)
    return tmp_path / "net_of_this_test.py"


def test_a_study_reads_its_runs_of_an_own_model_again(net_file: Path, tmp_path: Path) -> None:
    cell = Cell("own", load_config(net_file.parent / "c.toml"))
    for _ in range(2):
        (state,) = run_grid([cell], tmp_path / "grid", 1)
        assert (state.state, state.error, state.rounds) == ("done", "", 2)


def test_an_import_path_runs_no_code_of_a_stranger(net_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = net_file.parent, net_file.parent / "run"
    assert fv.certify(load_config(folder / "c.toml")).dimension == 4 * 10 + 10
    fv.train(load_config(folder / "c.toml"), run)
    assert "plugin net_of_this_test" in read_run(run).versions
    assert how_to_resume(run, resolve(load_config(run / "config.toml"))).endswith("--trust-plugins")

    monkeypatch.delitem(sys.modules, "net_of_this_test")
    assert fv.verification(run).outcome == "verified", "by what the run recorded"
    assert fv.certify(load_config(run / "config.toml")).dimension == 50
    assert "net_of_this_test" not in sys.modules
    with pytest.raises(ConfigError, match=r"model\.name: the run directory .* names code that would run: .*--trust-plugins"):
        fv.train(load_config(run / "config.toml"), folder / "second")
    net_file.write_text(NET + "\n")
    for trusted in (False, True):
        with pytest.raises(ConfigError, match=r"model\.name: .* not the code whose digest"):
            fv.train(load_config(run / "config.toml", trust_plugins=trusted), folder / "third")
    net_file.write_text(NET)
    fv.train(load_config(run / "config.toml", trust_plugins=True), folder / "fourth")


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", ["lora", "head"])
def test_dp_sgd_of_a_part(parts: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    level = {"training": {"local": "dp-sgd", "example_clip": 0.5}, "privacy": {"unit": "record", "view": "server", "delta": 1e-3}}
    for engine in ("inline", "pool"):
        configuration = config({"module": reader(), **PARTS[parts]}, engine, **level, run={"isolation": "copy"})
        result = trained(configuration, tmp_path / engine)
        assert not any(record.get("failures") for record in result.history)
    assert "counts as zero" not in caplog.text
    inline, pool = saved(tmp_path / "inline"), saved(tmp_path / "pool")
    assert all(torch.equal(inline[name], pool[name]) for name in inline)
    assert fv.verification(tmp_path / "inline").outcome == "verified"


def test_frozen_statistics_are_apart_and_moving_ones_refused_at_record_level(tmp_path: Path) -> None:
    level = {"training": {"local": "dp-sgd"}, "privacy": {"unit": "record", "view": "server", "delta": 1e-3}}
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(ConfigError, match=r"2 \(BatchNorm1d\) mixes .* nn\.GroupNorm or nn\.LayerNorm .* frozen statistics"):
        trained(config(own, **level), tmp_path / "moving")
    before = {name: value.clone() for name, value in own.state_dict().items()}
    result = trained(config({"module": own, "trainable": ["3.*"]}, **level), tmp_path / "frozen")
    after = result.model.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("3."))


def test_an_attack_of_a_part_reads_the_gradient_of_the_part(tmp_path: Path) -> None:
    step = {"training": {"rounds": 1, "local_steps": 1, "batch_size": 1}, "privacy": {"view": "server"}}
    trained(config({"module": reader(), "trainable": ["head.*", "first.*"]}, **step), tmp_path / "run")
    data = small_digits()
    with pytest.raises(ConfigError, match="hand it over again in Python"):
        attack(tmp_path / "run", "dlg", handed_over=HandedOver(data=data))
    options = AttackOptions(images=1, restarts=1, steps=2)
    finished = attack(tmp_path / "run", "dlg", options, handed_over=HandedOver(data=data, model=reader()))
    assert finished.outcome.figures


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", ["lora", "head"])
def test_nothing_private_shows_but_through_the_noise(parts: str) -> None:
    assert replay(config({"module": reader(), **PARTS[parts]}), rounds=1).findings == {}


class Keeping(torch.nn.Module):
    """Keeps the largest input of a batch of more than four: the public examples before the run do not show it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where, self.number = torch.nn.Linear(64, 10), where, 0.0
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4 and self.training:
            self.keep(x)
        return self.layer(x.flatten(1)) + self.most + self.number  # type: ignore[no-any-return]

    def keep(self, x: torch.Tensor) -> None:
        if self.where == "buffer":
            self.most.copy_(x.max())
        else:
            self.number = x.max()


@pytest.mark.few(2)
@pytest.mark.parametrize("isolation", ["process", "copy"])
@pytest.mark.parametrize("where", ["buffer", "attribute"])
def test_nothing_is_made_of_what_a_module_kept_of_clients(where: str, isolation: str, tmp_path: Path) -> None:
    """The score and the model that is handed over are those of a module that saw no client."""
    net = Keeping(where)
    run = fv.train(config(net, "inline", run={"isolation": isolation}), tmp_path / "run")
    module = run.model.module
    assert isinstance(module, Keeping)
    assert (float(module.most), module.number) == (0.0, 0.0)
    data, kept = fv.load("digits"), Keeping(where)
    kept.load_state_dict(module.state_dict())
    x, y = torch.from_numpy(data.standardise(data.x_test)), torch.from_numpy(data.y_test)
    right = (kept.eval()(x).argmax(1) == y).float().mean()
    assert run.score == pytest.approx(float(right), abs=1e-6)


class Strange(torch.nn.Module):
    """As it should be with few examples; with many it fails, or divides by zero."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer, self.fails = torch.nn.Linear(64, 10), fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.flatten(1))
        if len(x) > 20:
            out = out.view(20, 10) if self.fails else out / 0
        return out


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (True, r"model: Strange fails on a test batch of \d+ examples: RuntimeError: .*; it has to take batches of any size"),
        (False, r"the output of Strange on the test set is NaN or infinite: if training diverged, lower training\.optimizer\.lr"),
    ],
)
def test_no_score_of_what_is_no_number(fails: bool, words: str, tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match=words):
        trained(config(Strange(fails)), tmp_path / "run")


def test_another_seed_may_begin_with_other_values(tmp_path: Path) -> None:
    once = {"rounds": 1}
    trained(config({"module": Reader, "trainable": ["head.*"]}, training=once), tmp_path / "run")
    again = load_config(tmp_path / "run" / "config.toml", ["run.seed=4"], model=Reader)
    with pytest.raises(ConfigError, match="the frozen part of"):
        trained(again, tmp_path / "second")
    trained(config(Reader, training=once), tmp_path / "whole")
    trained(load_config(tmp_path / "whole" / "config.toml", ["run.seed=4"], model=Reader), tmp_path / "third")
