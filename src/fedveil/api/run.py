"""A run that was trained: its model, its scores, its privacy statement, and the checks and attacks on it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fedveil import verify
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import load_recorded
from fedveil.experiment.data_card import HandedOver, info_of
from fedveil.experiment.own_model import built
from fedveil.experiment.public_setting import model_seed, task_of
from fedveil.experiment.recorded_run import RunData, read_run
from fedveil.experiment.verification import verification
from fedveil.statement.statement_layout import PrintedStatement, read_statement

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from fedveil.api.use_model import TrainedModel
    from fedveil.attacks.attack_run import FinishedAttack
    from fedveil.attacks.replay import Replayed
    from fedveil.data.catalogue import Info
    from fedveil.data.dataset import Dataset
    from fedveil.data.partition import Partition


class History(Sequence[Mapping[str, Any]]):
    """The rows of a run's history, one per round, as dicts."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"<fedveil history of {len(self)} rounds: {', '.join(self._rows[0]) if self._rows else 'no columns'}>"

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            frames = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("history.frame() needs pandas: pip install pandas") from None
        return frames.DataFrame(list(self._rows))

    def _repr_html_(self) -> str:
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        head = "".join(f"<th>{name}</th>" for name in columns)
        body = "".join(f"<tr>{''.join(f'<td>{_short(row.get(name))}</td>' for name in columns)}</tr>" for row in self._rows)
        return f"<table><tr>{head}</tr>{body}</table>"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


class Verification(verify.Verification):
    """The findings of a verification; true only where everything was verified."""

    def __bool__(self) -> bool:
        return self.exit_status == 0


class Run:
    """A run directory, with what a program passed in to make it."""

    def __init__(self, path: str | Path, *, handed_over: HandedOver | None = None, model: nn.Module | None = None) -> None:
        self.path, self._handed_over, self._model = Path(path), handed_over or HandedOver(), model

    @cached_property
    def _read(self) -> RunData:
        return read_run(self.path)

    @cached_property
    def config(self) -> Config:
        """The configuration as it was recorded."""
        config = load_recorded(self.path)
        if self._handed_over.model is None:
            return config
        from fedveil.experiment.config_files import with_model

        return with_model(config, self._handed_over.model)

    @cached_property
    def model(self) -> nn.Module:
        """The trained network, in evaluation mode.

        Raises:
            ConfigError: the run did not end, or a program passed in the network: open the run with `model=` then.
        """
        if self._model is None:
            self._model = _trained(self.path, self.config, self._info)
        return self._model.eval()

    @cached_property
    def _info(self) -> Info:
        """The public facts about the data, from the run's data card."""
        return info_of(self.path)

    @property
    def history(self) -> History:
        """One row per round."""
        return History(self._read.history)

    @property
    def score(self) -> float:
        """The main metric of the model on the test set.

        Raises:
            ConfigError: the run was never evaluated.
        """
        return self.scores[self._read.declared.main.name.removeprefix("test_")]

    @property
    def scores(self) -> dict[str, float]:
        """The loss and all metrics of the model on the test set, by name."""
        last = next((row for row in reversed(self._read.history) if row.get("test_loss") is not None), None)
        if last is None:
            raise ConfigError(f"{self.path} was never evaluated, so there is no score: set training.evaluate_every above 0")
        tested = {name.removeprefix("test_"): value for name, value in last.items() if name.startswith("test_")}
        return {name: float(value) for name, value in tested.items() if value is not None}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about the scores: a trivial score, a rising loss, updates all cut to the clip, clients left out."""
        return self._read.warnings

    @property
    def privacy(self) -> PrintedStatement:
        """The privacy statement, with the audits so far: `run.privacy.proven.epsilon`."""
        return PrintedStatement.of(read_statement(self.path))

    @cached_property
    def trained(self) -> TrainedModel:
        """The network with the public facts about its data, which encode and normalise new examples."""
        from fedveil.api.use_model import TrainedModel

        return TrainedModel(self.model, self.path, self.config, task_of(self.config), self._info)

    def predict(self, new: Any) -> NDArray[Any]:
        """Return the model's answer for each example.

        Args:
            new: examples [n, ...] in the units of the data: an array, a tensor, a list, a table with the columns that the run was
                trained on (the target is not needed), or a `Dataset`, whose test set is taken.

        Returns:
            Class numbers, zeros and ones, quantities in the unit of the target, or the risk, as the task has it.

        Raises:
            DataError: examples of another shape, or rows of a table that cannot be encoded; the message names them.
        """
        return self.trained.predictions(new)

    def probabilities(self, new: Any) -> NDArray[Any]:
        """Return the probability of each class or label [n, C, ...].

        Args:
            new: as for `predict`.

        Raises:
            ConfigError: the task has no probabilities. DataError: as for `predict`.
        """
        return self.trained.probabilities(new)

    def export(self, out: str | Path) -> Path:
        """Write the model for other programs, and return the path.

        Args:
            out: .pt for the state dict of `run.model`, or .onnx for a graph (needs fedveil[onnx]).

        Raises:
            ConfigError: another suffix, a missing package, or a network that ONNX cannot express.
        """
        return self.trained.export(out)

    def plot(self, what: str | Sequence[str] | None = None, out: str | Path | None = None) -> Path:
        """Draw columns of the history over the rounds, and return the picture's path.

        Args:
            what: the main metric, `loss`, `noise`, `clip`, or columns of the history; an overview if left out.
            out: .png, .svg or .pdf; in the run directory if left out.
        """
        from fedveil.report.figures import plot_run

        return plot_run(self.path, [what] if isinstance(what, str) else what, out)

    def audit(self, n: int = 1000, *, confidence: float = 0.95, canaries: int = 0) -> PrintedStatement:
        """Attack the mechanism, keep the lower bounds on epsilon with the run, and return the statement with them.

        Args:
            n: releases, or runs, in each of the two worlds. canaries: clients who train as canaries in one run more.
        """
        from fedveil.attacks.audit_run import audit_run

        return PrintedStatement.of(
            audit_run(self.path, n=n, confidence=confidence, canaries=canaries, handed_over=self._handed_over)
        )

    def attack(self, kind: str, *, out: str | Path | None = None, **options: Any) -> FinishedAttack:
        """Attack what the run released, such as `run.attack("ig", images=4)`.

        Args:
            kind: such as "ig"; the error for an unknown name lists all kinds.
            options: those of `fedveil attack`: images, batch, restarts, steps, seed, round.
        """
        from fedveil.attacks.attack_options import AttackOptions
        from fedveil.attacks.attack_run import attack

        return attack(self.path, kind, AttackOptions(**options), out=out, handed_over=self._handed_over)

    def replay(self, rounds: int = 3) -> Replayed:
        """Replay the first rounds on neighbouring data: everything else that is public must be the same."""
        from fedveil.attacks.replay import replay

        return replay(self.config, rounds=rounds, handed_over=self._handed_over)

    def verify(self, *, pin: str | None = None, against: Sequence[str | Path] = ()) -> Verification:
        """Check the run directory; true only where everything was verified.

        Args:
            pin: the closing digest, known from elsewhere. against: folders of clients that took part (`fedveil join --dir`).
        """
        return Verification(*verification(self.path, pin=pin, against=[Path(folder) for folder in against]))

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report, one self-contained HTML page, and return its path."""
        from fedveil.report.report import write_report

        return write_report([self.path], out)

    def __repr__(self) -> str:
        return f"<fedveil.Run {self.path}: {self._summary}{''.join(f'; warning: {text}' for text in self.warnings)}>"

    def _repr_html_(self) -> str:
        warnings = "".join(f"<p><b>warning:</b> {escape(text)}</p>" for text in self.warnings)
        return f"<p><b>{escape(str(self.path))}</b>: {escape(self._summary)}</p>{warnings}{self.privacy._repr_html_()}"

    @property
    def _summary(self) -> str:
        from fedveil.accounting.types import at_most

        main, rows = self._read.declared.main, self._read.history
        values = [row[main.name] for row in rows if row.get(main.name) is not None]
        score = f"{main.phrase} {main.text(values[-1])}" if values else "not evaluated"
        proven = self.privacy.proven.epsilon
        return f"{score} after {len(rows)} rounds; " + (
            f"proven epsilon {at_most(proven)}" if proven < np.inf else "nothing proven"
        )


def _trained(path: Path, config: Config, info: Info) -> nn.Module:
    """Return the network of a run with its trained parameters and buffers."""
    from safetensors.torch import load_file

    file = path / "model.safetensors"
    if not file.is_file():
        raise ConfigError(f"{path} has no model.safetensors: the run did not end; continue it with resume=True")
    module = built(config.model, info.input_shape, task_of(config).outputs(info), model_seed(config.run.seed))
    wrong = module.load_state_dict(load_file(file), strict=False)  # of a network with frozen parts, the rest is saved alone
    if wrong.unexpected_keys:
        raise ConfigError(
            f"{file} holds {wrong.unexpected_keys[0]}, which this network lacks: open the run with the one it trained"
        )
    return module


def open_run(path: str | Path, *, data: Dataset | None = None, partition: Partition | None = None, model: object = None) -> Run:
    """Return the run in a directory.

    Args:
        data, partition, model: what a program passed in when it was trained; needed for `model`, `audit`, `attack` and `replay`
            of such runs.

    Raises:
        ConfigError: no run directory.
    """
    if not (Path(path) / "config.toml").is_file():
        raise ConfigError(f"{path} is not a run directory (it has no config.toml): give one that fit or `fedveil run` left")
    return Run(path, handed_over=HandedOver(data, partition, model))
