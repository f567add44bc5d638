"""The run directory of a Flower app's training: the configuration of fedveil that matches it, statement, ledger, history.

What fedveil does not know of an app stays out of `config.toml`: how clients train, on what. `data.json` has the number of
clients, and says that its other entries stand for nothing. `flower.md` says what the statement, which is that of the matching
configuration, cannot.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

import fedveil.run.run_directory as rundir
from fedveil.configuration.config import Config, parse
from fedveil.configuration.network import HANDED_OVER
from fedveil.configuration.public_setting import FLOWER_APP, Population
from fedveil.data.catalogue import Info
from fedveil.federation.history import Record, Row
from fedveil.federation.measures import SeenRound, release_figures
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Ledger
from fedveil.methods.base import gaussian_plan
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.release.sealed import AGGREGATE
from fedveil.run.assembly import budgets, new_run_id
from fedveil.run.binding import conclude, opening
from fedveil.run.data_card import CARD, FORMAT, new_salt
from fedveil.run.history_files import append_history
from fedveil.run.resolve import resolve
from fedveil.run.shared_budget import check_plan, shared_budget
from fedveil.run.spending import EpsilonSpent
from fedveil.statement.statement_json import to_dict
from fedveil.statement.statement_markdown import to_markdown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedveil.mechanism.plan import Plan, Upload
    from fedveil.methods.base import Method, Setting
    from fedveil.release.sealed import Contribution
    from fedveil.statement.statement import Statement
    from fedveil.training.params import Layout

DATA = Info(
    FLOWER_APP, "", (1,), 1, 0, 0, 0, "the clients of a Flower app; fedveil has not seen them", False, (0.0,), (1.0,), 1.0
)
"""In the place of data that fedveil knows nothing of."""
_UNKNOWN = (
    "of a Flower app fedveil knows the number of clients and the shapes of the model; examples, labels, sizes and normalisation "
    "below stand for nothing"
)


def matching_configuration(
    sections: Mapping[str, Mapping[str, Any]], clients: int, layout: Layout, *, evaluate: bool = False
) -> Config:
    """The configuration of fedveil whose releases are those of a Flower app.

    Args:
        sections: method, training, privacy and run, as far as they are known. evaluate: clients evaluate, beside the releases.

    Raises:
        ConfigError: an impossible value.
    """
    shapes = dict(zip(layout.names, map(list, layout.shapes), strict=True))
    partition = {"kind": "flower", "clients": clients, **({"evaluate": True} if evaluate else {})}
    data = {"name": DATA.name, "handed_over": ["data", "partition"], "partition": partition}
    model = {"name": HANDED_OVER, "recorded": {"class": "Flower app", "shapes": shapes}}
    return parse({"data": data, "model": model, **{name: dict(section) for name, section in sections.items()}})


@dataclass
class AppRun:
    """A run directory that is being written.

    Args:
        statement: what it promises. plan: of every release. door: which charges the ledger of the directory.
    """

    path: Path
    run: str
    statement: Statement
    method: Method
    setting: Setting
    plan: Plan
    door: Door
    history: list[Record] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, path: Path, config: Config, clients: int, page: str) -> AppRun:
        """Write what a run writes before it trains, its ledger last.

        Args:
            page: the text of `flower.md`.

        Raises:
            ConfigError: there is something at `path`, or the numbers make no sense (delta >= 1 / clients, for one).
        BudgetExhausted: what is planned does not fit into the budget that it shares with others.
        """
        experiment = resolve(config, Population(DATA, clients, 0))
        method, setting, statement = experiment.method, experiment.setting, experiment.statement
        run, shared = new_run_id(), shared_budget(experiment)
        if shared is not None:
            check_plan(shared, experiment, run)
        rundir.create(path)
        rundir.write_versions(path / "versions.json")
        rundir.write_text(path / "config.toml", _written(experiment.written))
        rundir.write_json(path / "statement.json", to_dict(statement))
        rundir.write_text(path / "statement.md", to_markdown(statement))
        new_salt(path)
        rundir.write_json(path / CARD, _card(clients))
        rundir.write_text(path / "flower.md", page)
        Ledger.create(path / "ledger.sqlite", run, opening(path, method.name)).close()
        population = None if shared is None else shared.ledger(run)
        ledger = BudgetedLedger(path / "ledger.sqlite", budgets(method, setting), experiment.seeded_noise, population=population)
        rate, most = setting.rate if setting.amplified else None, experiment.max_update_norm
        randomness = Randomness(experiment.seed, experiment.seeded_noise)
        door = Door(setting.layout, setting.scope, run, ledger, randomness, rate=rate, max_norm=most)
        clip = method.clip_norm(setting)
        assert clip is not None
        return cls(path, run, statement, method, setting, gaussian_plan(setting, clip), door)

    def __post_init__(self) -> None:
        assert isinstance(self.door.ledger, BudgetedLedger)
        self._spent = EpsilonSpent(self.door.ledger, self.method, self.setting, self.statement)

    @property
    def noise_norm(self) -> float:
        """The expected L2 norm of the noise on the mean of a round."""
        assert isinstance(self.plan.noise_std, float)
        return self.plan.noise_std / self.setting.cohort * math.sqrt(self.setting.layout.dimension)

    def release(self, round: int, contributions: Sequence[Contribution], failures: Mapping[int, str]) -> Upload:
        """The noisy mean of a round, charged, and its record.

        Args:
            round: from 0. contributions: of all that were drawn. failures: why some of these are zero; they stay in the private
                part of the directory.
        """
        upload = self.door.release_sum(contributions, self.plan, round, self.setting.cohort)
        seen = SeenRound(round, len(contributions), norm=float(upload.vector.norm())).in_view(self.method, self.setting)
        public = release_figures(self.method, self.setting, seen)
        public["noise_norm"] = float(upload.noise_std[0]) * self.setting.layout.dimension**0.5
        private: Row = {} if "participants" in public else {"participants": len(contributions)}
        private |= {"failed": len(failures), "seconds": time.monotonic() - self._started, "failures": dict(failures)}
        self._started = time.monotonic()
        self.history.append(Record(public | self._spent.after(round), private))
        append_history(self.path, self.history, self.setting.layout)
        return upload

    def end(self, early: str = "") -> str:
        """Close the ledger over all that is there; returns the closing digest.

        Args:
            early: why it ends before its last round, or an empty string; it is public.
        """
        self.close()
        if not self.history:
            rundir.write_text(self.path / "history.csv", "round\n")
        last = self.history[-1].public if self.history else {}
        done = {"run": self.run, "rounds": len(self.history), "ended": early or "after its last round", "final": last}
        summary = rundir.json_text(done)
        closing = conclude(self.path, len(self.history), early, {"summary.json": summary.encode()})
        rundir.write_text(self.path / "summary.json", summary)
        return closing

    def close(self) -> None:
        """Close the connection to the ledger."""
        assert isinstance(self.door.ledger, BudgetedLedger)
        self.door.ledger.close()

    def admits(self, round: int) -> bool:
        """Whether the budget has room for one more round."""
        return self.door.admits(self.plan, AGGREGATE, round)


def _written(config: Mapping[str, Any]) -> str:
    """The keys that are known; local training is left out, since defaults would say something untrue of it."""
    whole = rundir.present(config)
    training = {
        key: whole["training"][key] for key in ("rounds", "clients_per_round", "sampling", "local") if key in whole["training"]
    }
    data = {key: whole["data"][key] for key in ("name", "handed_over", "partition")}
    run = {key: whole["run"][key] for key in ("seed", "seeded_noise")}
    known = {name: whole[name] for name in ("model", "method", "privacy")}
    return tomli_w.dumps({"data": data, **known, "training": training, "run": run})


def _card(clients: int) -> dict[str, Any]:
    card = {
        "name": DATA.name,
        "source": DATA.source,
        "unknown": _UNKNOWN,
        "examples": {"shape": list(DATA.input_shape)},
        "labels": {"shape": [], "dtype": "int64", "classes": DATA.classes},
        "train_examples": 0,
        "test_examples": 0,
        "normalisation": {"scale": DATA.scale, "mean": list(DATA.mean), "std": list(DATA.std)},
        "clients": clients,
        "nominal_examples_per_client": 0,
    }
    return {"format": FORMAT, **json.loads(rundir.json_text(card)), "treated_as_public": ["clients"]}
