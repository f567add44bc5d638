"""A federation and its comparison with others: what is trained, by which method, under which promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedveil.accounting.types import at_least, at_most
from fedveil.api.run import History, Run, open_run
from fedveil.data.dataset import Dataset
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure, replace
from fedveil.experiment.config_files import load_config
from fedveil.experiment.data_card import HandedOver
from fedveil.experiment.sections import DataSection, Privacy, PublicSection, RunSection, Training
from fedveil.methods.base import MethodConfig
from fedveil.statement.statement_layout import PrintedStatement
from fedveil.statement.statement_text import variant_of
from fedveil.tasks.task import Task

if TYPE_CHECKING:
    from torch import nn

    from fedveil.data.partition import Partition


Sections = Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class Federation:
    """A configured federation, before it is trained.

    Each section is an object, a name or a dict of its keys; a section that is left out has its defaults (docs/configuration.md).

    Args:
        model: an `nn.Module`, whose parameters are the initial model; a class or function that makes one; or a built-in network.
        task: what is learned, such as `fv.Regression(mean=40, scale=30)`; classification if left out.
        method: such as `fv.DPFedAvg(clip=0.5)` or "fedavg".
        training: rounds, clients per round, local steps. privacy: the target epsilon, delta, unit and view.
        data: a data set of the catalogue or of files, and how it is divided among clients; not needed where `fit` gets the data.
        public: what is public about the features. run: seed, engine, plugins.

    Raises:
        ConfigError: an unknown key or name, or an impossible value.
    """

    model: nn.Module | Callable[..., nn.Module] | str | Sections | None = None
    task: Task | type[Task] | str | Sections | None = None
    method: MethodConfig | str | Sections | None = None
    training: Training | Sections | None = None
    privacy: Privacy | Sections | None = None
    data: DataSection | str | Sections | None = None
    public: PublicSection | Sections | None = None
    run: RunSection | Sections | None = None

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.data, str):
            given["data"] = {"name": self.data}
        object.__setattr__(self, "_config", configure(**{name: value for name, value in given.items() if value is not None}))

    @property
    def config(self) -> Config:
        """The configuration as it was checked, with all defaults."""
        config: Config = self.__dict__["_config"]
        return config

    @classmethod
    def from_config(cls, config: Config) -> Federation:
        """Return the federation of a checked configuration."""
        made = cls.__new__(cls)
        for field in fields(cls):
            object.__setattr__(made, field.name, getattr(config, field.name))
        object.__setattr__(made, "_config", config)
        return made

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Sequence[str] = (), *, model: object = None) -> Federation:
        """Return the federation that a TOML file describes.

        Args:
            overrides: `section.key=value`, as after `--set` on the command line. model: in the place of the file's.

        Raises:
            ConfigError: the file cannot be read, or is no configuration.
        """
        return cls.from_config(load_config(path, overrides, model=model))

    def replace(self, **changes: Any) -> Federation:
        """Return a federation with some keys changed: `privacy__epsilon=2`, or a section such as `method=fv.FedAvg()`.

        Raises:
            ConfigError: an unknown key, or an impossible value.
        """
        return self.from_config(replace(self.config, {key.replace("__", "."): value for key, value in changes.items()}))

    def certify(self, data: Dataset | None = None) -> PrintedStatement:
        """Return the privacy statement: claimed and proven epsilon in every view. Nothing is trained.

        Args:
            data: as for `fit`; only public facts, such as the number of clients, are used.

        Raises:
            ConfigError: the run cannot be made as configured.
        """
        return PrintedStatement.of(certify_config(self.config, data))

    def fit(
        self,
        data: Dataset | None = None,
        *,
        out: str | Path | None = None,
        seed: int | None = None,
        engine: str | None = None,
        isolation: Literal["process", "pass", "copy"] | None = None,
        resume: bool = False,
        partition: Partition | None = None,
    ) -> Run:
        """Train, write a run directory, and return the run.

        Args:
            data: in the place of the configured ones. partition: which client has which examples.
            out: the run directory, new or empty; runs/<method>-<data>-<id> if left out.
            seed: of batches, sampling and initial model; the noise is secret, whatever the seed.
            engine: such as "inline", "pool" or "cuda". resume: continue the interrupted run in `out`.
            isolation: whether user-defined code sees each client's data, or each pass of DP-SGD, in a process of its own, or
                trains a copy of itself.

        Raises:
            ConfigError, DataError: before anything is trained. BudgetExhausted: more is planned than privacy.budget has left.
        """
        from fedveil.experiment.run import run

        chosen = {"run.seed": seed, "run.engine": engine, "run.isolation": isolation}
        changes = {key: value for key, value in chosen.items() if value is not None}
        config = replace(self.config, changes) if changes else self.config
        result = run(config, out, data=data, partition=partition, resume=resume)
        handed_over = HandedOver(data, partition, config.model.source)
        return Run(result.path, handed_over=handed_over, model=result.model.module)

    def __repr__(self) -> str:
        config = self.config
        promise = f"epsilon {config.privacy.epsilon:g}" if config.privacy.epsilon is not None else "no target epsilon"
        return f"<fedveil.Federation: {config.method.name}, {config.task.name}, {config.training.rounds} rounds, {promise}>"


class Comparison:
    """Runs side by side; `rows` has a dict for each, `report` writes them as one page."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)

    @property
    def rows(self) -> History:
        """Return one row per run: method, variant, score, and the three epsilons of the run's own view."""
        return History([_row(run) for run in self.runs])

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        return self.rows.frame()

    def report(self, out: str | Path = "report.html") -> Path:
        """Write the runs as one self-contained HTML page and return its path."""
        from fedveil.report.report import write_report

        return write_report([run.path for run in self.runs], out)

    def __repr__(self) -> str:
        return "\n".join(f"{row['run']}: " + ", ".join(f"{k} {v}" for k, v in row.items() if k != "run") for row in self.rows)

    def _repr_html_(self) -> str:
        return self.rows._repr_html_()


def compare(runs: Sequence[Run | str | Path]) -> Comparison:
    """Return runs, or run directories, side by side.

    Raises:
        ConfigError: no run, or a directory that is none.
    """
    if not runs:
        raise ConfigError("there is nothing to compare: give at least one run")
    return Comparison([run if isinstance(run, Run) else open_run(run) for run in runs])


def _row(run: Run) -> dict[str, Any]:
    statement = run.privacy
    claimed, audited = statement.own.claimed, statement.own.audited
    return {
        "run": str(run.path),
        "method": statement.method,
        "variant": variant_of(statement),
        "score": run.score,
        "claimed": None if claimed is None else at_most(claimed.epsilon),
        "proven": at_most(statement.proven.epsilon),
        "audited": None if audited is None else at_least(audited.epsilon),
        "scope": str(statement.scope),
    }
