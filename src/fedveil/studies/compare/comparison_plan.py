"""The plan of a comparison: its specification, and each method at each guarantee with each seed, checked before training."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from scipy.optimize import brentq

from fedveil.data.partition import checked_options
from fedveil.data.partition_options import PARTITIONS
from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, override, parse
from fedveil.experiment.public_setting import calibrated_setting, method_of, objective_of, task_of
from fedveil.federation.history import columns_of
from fedveil.methods.method_registry import METHODS
from fedveil.statement.statement import Statement
from fedveil.studies.cell import Cell, Listener
from fedveil.tasks.task import Column

if TYPE_CHECKING:
    from fedveil.data.dataset import Dataset


By = Literal["proven", "claimed"]


@dataclass(frozen=True)
class ComparisonSpec:
    """Every method at every epsilon with every seed, at equal guarantee.

    Args:
        config: common configuration; its method section is used for that method only.
        methods: `name` or `name:key=value:key=value`; a key with a dot belongs to another section.
        epsilons: guarantees; inf for a run without noise.
        seeds: each has its own initial model, partition, batches and noise (see `seeds_from`).
        partitions: `kind`, `kind:value` or `kind:key=value:...`; empty for that of the configuration.
        by: `proven`, proven variants at equal proven epsilon; `claimed`, published variants at equal claimed epsilon.
        metric: the compared number, a column of the history after the last round; empty for the main metric of the task.

    Raises:
        ConfigError: there is nothing to compare, a value is given twice, or a value is invalid.
    """

    config: Config
    methods: Sequence[str]
    epsilons: Sequence[float]
    seeds: Sequence[int]
    partitions: Sequence[str] = ()
    by: By = "proven"
    metric: str = ""

    def __post_init__(self) -> None:
        if self.by not in ("proven", "claimed"):
            raise ConfigError(f"--by {self.by}: there are proven and claimed")
        known = columns_of(task_of(self.config)).comparable
        if self.metric and self.metric not in known:
            raise ConfigError(f"--metric {self.metric}: there are {', '.join(known)}")
        if not self.methods or not self.epsilons or not self.seeds:
            raise ConfigError("give at least one method, one epsilon and one seed")
        _distinct("--methods", self.methods)
        _distinct("--epsilon", [f"{e:g}" for e in self.epsilons])
        _distinct("--seeds", [str(s) for s in self.seeds])
        _distinct("--partition", self.partitions)
        if bad := [e for e in self.epsilons if not e > 0]:
            raise ConfigError(f"--epsilon {bad[0]:g}: an epsilon is a number above 0, or inf for no noise")
        if self.by == "claimed" and math.inf in self.epsilons:
            raise ConfigError(
                "--epsilon inf is a run without noise, for which nothing is claimed: leave it out, or use --by proven"
            )


def column_of(config: Config, metric: str) -> Column:
    """Return the compared column: `metric`, or the main metric of the task."""
    columns = columns_of(task_of(config))
    return columns[metric] if metric else columns.main


def seeds_from(config: Config, count: int) -> range:
    """Return a number of consecutive seeds, starting with that of the configuration."""
    if count < 1:
        raise ConfigError(f"--seeds {count}: at least 1 seed is needed, 3 or more to see a spread")
    return range(config.run.seed, config.run.seed + count)


def _distinct(option: str, values: Sequence[str]) -> None:
    if len(set(values)) < len(values):
        raise ConfigError(f"{option} names {next(v for v in values if list(values).count(v) > 1)} twice: give each once")


_PROMISE = ("privacy.view", "privacy.unit", "privacy.adjacency", "privacy.delta")
"""The scope of an epsilon; proven epsilons are comparable only if these keys are equal."""


def configured(config: Config, method: str, by: By = "proven") -> Config:
    """Return the configuration with another method, `name:key=value:...`; the method of the configuration keeps its options.

    Raises:
        ConfigError: the method is unknown, or an option is invalid.
    """
    name, *options = method.split(":")
    kind = METHODS.find(name, "--methods")
    raw = config.model_dump(mode="json")
    own = raw["method"] if raw["method"].get("name") == name else {}
    fields = kind.model_fields
    raw["method"] = {**own, "name": name}
    if "variant" in fields:
        raw["method"]["variant"] = "published" if by == "claimed" else "proven"
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key in ("name", "run.seed", "privacy.epsilon", "privacy.noise_multiplier", "data.partition"):
            raise ConfigError(
                f"--methods {method}: {option!r} is not possible; give options as name:key=value:key=value, a key with a dot "
                "for another section (training.optimizer.lr=0.1); epsilon, seeds and partitions have options of their own"
            )
        if by == "proven" and key in _PROMISE:
            raise ConfigError(
                f"--methods {method}: {key} is part of the guarantee, which is the same for all methods: "
                f"set it in the configuration (--set {option}); with --by claimed the methods may differ in it"
            )
        override(raw, f"{key if '.' in key else f'method.{key}'}={value}")
    return parse(raw)


def _with_partitions(config: Config, partitions: Sequence[str]) -> list[tuple[str, Config]]:
    """Return the configuration with each partition, by name; unchanged if none is given."""
    if not partitions:
        return [("", config)]
    return [
        (text, config.model_copy(update={"data": config.data.model_copy(update={"partition": partition_of(text, config)})}))
        for text in partitions
    ]


def partition_of(text: str, config: Config) -> dict[str, Any]:
    """Parse the partition that `kind:value` or `kind:key=value:...` describes, by default with the clients of the configuration.

    Raises:
        ConfigError: the kind, a key or a value is unknown or invalid.
    """
    kind, *parts = text.split(":")
    raw: dict[str, Any] = {"partition": {"kind": kind}}
    if (clients := config.data.partition.get("clients")) is not None:
        raw["partition"]["clients"] = clients
    for part in parts:
        key, equals, value = part.partition("=")
        override(raw, f"partition.{key}={value}" if equals else f"partition.{_main_option(kind)}={key}")
    checked_options(raw["partition"])
    return dict(raw["partition"])


def _main_option(kind: str) -> str:
    """Return the option for which a bare value stands: the first option specific to the kind."""
    fields = PARTITIONS[kind].model_fields if kind in PARTITIONS else {}
    own = [key for key in fields if key not in ("kind", "clients")]
    return own[0] if own else "clients"


_CLOSE = 1e-3
"""The relative difference up to which claims count as equal."""
TIMES = 10
"""privacy.epsilon is searched up to 4 ** TIMES above or below the wanted claim."""


def at_claim(config: Config, epsilon: float) -> Config:
    """Return the configuration with claim `epsilon`; without a claim in addition to the proof, the one that proves it.

    `privacy.epsilon` of a published variant is the epsilon of the paper (of a round, of a step, of the whole run), so the claim
    for the run can differ from it.

    Raises:
        ConfigError: the claim does not follow privacy.epsilon, or jumps over the wanted one.
    """
    first = _claimed(config, epsilon)
    if first is None or math.isclose(first, epsilon, rel_tol=_CLOSE):
        return _at(config, epsilon)
    bracket = _bracket(config, epsilon, first)
    if bracket is not None:
        found = math.exp(float(brentq(lambda x: _gap(config, x, epsilon), *bracket, rtol=1e-9)))
        if math.isclose(_claimed(config, found) or 0.0, epsilon, rel_tol=_CLOSE):
            return _at(config, found)
    raise ConfigError(
        f"no privacy.epsilon was found at which the paper claims {epsilon:g}: "
        f"at privacy.epsilon = {epsilon:g} it claims {first:.4g}, and it does not follow"
    )


def _bracket(config: Config, epsilon: float, first: float) -> tuple[float, float] | None:
    """Return logarithms of two values of privacy.epsilon with claims below and above the wanted claim; None if there are none."""
    start = math.log(epsilon)
    step = -1 if first > epsilon else 1
    for times in range(1, TIMES + 1):
        other = start + step * times * math.log(4)
        if _gap(config, other, epsilon) * step >= 0:
            return other - step * math.log(4), other
    return None


def _gap(config: Config, log: float, epsilon: float) -> float:
    """Return the logarithm of the claim divided by the wanted claim."""
    claimed = _claimed(config, math.exp(log)) or 0.0
    return math.log(max(claimed, 1e-300)) - math.log(epsilon)


def _claimed(config: Config, epsilon: float) -> float | None:
    method, setting = calibrated_setting(_at(config, epsilon))
    claim = method.claim(setting)
    return None if claim is None else claim.epsilon


def _at(config: Config, epsilon: float) -> Config:
    section = config.privacy.model_copy(update={"epsilon": epsilon, "noise_multiplier": None})
    return config.model_copy(update={"privacy": section})


class Check:
    """A check of configurations, which loads each data set once and partitions it once per seed.

    Args:
        column: the compared number.
    """

    def __init__(self, column: Column) -> None:
        self.column = column
        self._loaded: dict[tuple[str, ...], Dataset] = {}
        self._problems: dict[tuple[str, int], str] = {}

    def problem(self, configs: Sequence[Config]) -> str:
        """Return why the runs of a row, which differ in the seed only, cannot give the number; an empty string if they can."""
        try:
            if self.column.name.startswith("mean_personal_"):
                _needs_personal_models(configs[0], self.column.name)
        except FedveilError as problem:
            return str(problem)
        problems = {config.run.seed: message for config in configs if (message := self._partition(config))}
        if not problems:
            return ""
        return f"seed{'s' * (len(problems) > 1)} {', '.join(map(str, problems))}: {'; '.join(dict.fromkeys(problems.values()))}"

    def _partition(self, config: Config) -> str:
        from fedveil.experiment.assembly import prepare
        from fedveil.experiment.resolve import data_spec

        key = config.data.model_dump_json(), config.run.seed
        source = config.data.name, str(config.data.data_dir), str(config.data.source)
        if key not in self._problems:
            try:
                ready = prepare(data_spec(config), self._loaded.get(source))
                if config.data.partition.get("kind") != "users":  # another seed may have split off other tests
                    self._loaded = {source: ready.dataset}
                self._problems[key] = ""
            except FedveilError as problem:
                self._problems[key] = str(problem)
        return self._problems[key]


def _needs_personal_models(config: Config, metric: str) -> None:
    """Refuse a configuration that does not measure personal models of clients."""
    from fedveil.training.local import HasPersonalModel

    if config.run.engine == "flower":
        raise ConfigError(
            f"{metric} is measured where run.engine is not 'flower', whose clients keep their own models to themselves"
        )
    on_test_set = metric.startswith("mean_personal_test_")
    if on_test_set and not config.training.personal_on_test_set:
        raise ConfigError(f"{metric} is measured where training.personal_on_test_set = true: set it")
    if not on_test_set and not config.data.client_test_fraction:
        raise ConfigError(f"{metric} is measured on the clients' own tests: set data.client_test_fraction, such as 0.2")
    method, setting = calibrated_setting(config)
    if not isinstance(objective_of(config, method, setting), HasPersonalModel):
        raise ConfigError(f"{method.name} has no models of the clients' own, so no {metric}; training.measure_trained makes some")


_SLACK = 1e-4
"""The largest relative excess of a proven epsilon over its target, for rounding in the calibration."""


@dataclass(frozen=True)
class Planned:
    """One row of the comparison, before it is run.

    Args:
        method: as given, with options. partition: as given, or empty if there is only one.
        epsilon: the guarantee; inf for a run without noise. cells: one per seed, none if the row cannot be run.
        reason: why it cannot be run. statement: the promise of the runs.
    """

    method: str
    partition: str
    epsilon: float
    cells: tuple[Cell, ...]
    reason: str = ""
    statement: Statement | None = None


class ComparisonListener(Listener):
    """A listener to a comparison, which ignores all events."""

    def checking(self, what: str) -> None:
        """Called before a method is checked with a partition."""

    def planned(self, rows: Sequence[Planned]) -> None:
        """Called when all methods are checked, before anything runs."""


def plan(spec: ComparisonSpec, listener: ComparisonListener | None = None) -> list[Planned]:
    """Return the rows of the comparison, with a reason if they cannot be run; this partitions the data for each seed.

    A method without calibrated noise is run once without noise, as the reference.

    Raises:
        ConfigError: a method, key, partition or value is unknown.
    """
    method_of(spec.config)  # plugins of the configuration may define other methods
    check, listener = Check(column_of(spec.config, spec.metric)), listener or ComparisonListener()
    places = _with_partitions(spec.config, spec.partitions)
    asked = [(configured(base, method, spec.by), method, partition) for partition, base in places for method in spec.methods]
    rows: list[Planned] = []
    for mine, method, partition in asked:
        listener.checking(f"{method} {partition}".strip())
        rows += (_checked(row, check) for row in _rows(mine, method, partition, spec))
    return rows


# --- one row ------------------------------------------------------------------------------------------------------------


def _rows(config: Config, method: str, partition: str, spec: ComparisonSpec) -> list[Planned]:
    """Return the rows of a method, one per guarantee; for a method without noise, the reference."""
    reference = _without_noise(_privacy(config), method, partition, spec.seeds)
    if reference.cells:
        return [reference]
    free = _privacy(config, noise_multiplier=0.0)
    return [
        _row(config, method, partition, e, spec) if e < math.inf else _without_noise(free, method, partition, spec.seeds)
        for e in sorted(spec.epsilons)
    ]


def _checked(row: Planned, check: Check) -> Planned:
    """Return the row, with a reason instead of cells if these cannot give the number."""
    problem = check.problem([cell.config for cell in row.cells]) if row.cells else ""
    return replace(row, cells=(), reason=problem) if problem else row


def _row(config: Config, method: str, partition: str, epsilon: float, spec: ComparisonSpec) -> Planned:
    try:
        private = _privacy(config, epsilon=epsilon) if spec.by == "proven" else at_claim(config, epsilon)
        statement = certify_config(private)
        _same_guarantee(statement, epsilon, spec.by)
    except FedveilError as problem:
        return Planned(method, partition, epsilon, (), str(problem))
    name = f"{'claimed-' if spec.by == 'claimed' else ''}eps-{epsilon:g}"
    return Planned(method, partition, epsilon, _cells(private, method, partition, epsilon, name, spec.seeds), "", statement)


def _same_guarantee(statement: Statement, epsilon: float, by: By) -> None:
    """Refuse a configuration that does not keep the common guarantee of the rows."""
    proven = statement.proven
    if by == "proven" and not proven.epsilon <= epsilon * (1 + _SLACK):
        raise ConfigError(
            f"proven is {'no bound' if math.isinf(proven.epsilon) else f'epsilon = {proven.epsilon:g}'}"
            f"{f' ({proven.reason})' if proven.reason else ''}: not comparable at a proven epsilon of {epsilon:g}"
        )


def _without_noise(config: Config, method: str, partition: str, seeds: Sequence[int]) -> Planned:
    """Return the row of a configuration without noise."""
    try:
        statement = certify_config(config)
    except FedveilError as problem:
        return Planned(method, partition, math.inf, (), str(problem))
    if statement.proven.epsilon < math.inf:
        return Planned(method, partition, math.inf, (), "there is noise in it all the same")
    return Planned(method, partition, math.inf, _cells(config, method, partition, math.inf, "no-noise", seeds), "", statement)


def _cells(config: Config, method: str, partition: str, epsilon: float, name: str, seeds: Sequence[int]) -> tuple[Cell, ...]:
    labels: dict[str, str | float] = {"method": method, "partition": partition, "epsilon": epsilon}
    folder = "/".join(filter(None, (_slug(method), _slug(partition), name)))
    return tuple(
        Cell(
            f"{folder}/seed-{seed}",
            config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})}),
            {**labels, "seed": seed},
        )
        for seed in seeds
    )


def _privacy(config: Config, **promise: float) -> Config:
    """Return the configuration with this promise and no other."""
    section = config.privacy.model_copy(update={"epsilon": None, "noise_multiplier": None, **promise})
    return config.model_copy(update={"privacy": section})


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", text).strip("-")
