"""The sections of a configuration, each with its keys, their defaults and their ranges.

The types of `method` and `task` depend on their names; so does that of `model` (see `model_section`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, field_validator, model_validator

from fedveil.accounting.selection import Selection
from fedveil.accounting.types import Adjacency, Unit, View
from fedveil.data.catalogue import CATALOGUE
from fedveil.data.features import SHAPES
from fedveil.data.own.data_source import DataSource, source_of, whole_path
from fedveil.errors import ConfigError, nearest
from fedveil.mechanism.grid import MAX_BITS
from fedveil.methods.base import MethodConfig
from fedveil.methods.method_registry import METHODS, method_from
from fedveil.methods.setting import FinalModel, NoiseCohort, NoisePlace, SecureAggregation
from fedveil.release.release_layout import EvaluationCounts
from fedveil.tasks.task import Task
from fedveil.tasks.task_registry import TASKS, register_task, task_from
from fedveil.training.local import Precision, Schedule
from fedveil.training.optimizer import OptimizerSpec

FREE = "changes no result"
"""Marks a key that may differ between runs with the same model and history."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _source_keys(source: DataSource | None) -> dict[str, Any] | None:
    """Return the given keys of the section `data.source`."""
    return None if source is None else source.model_dump(mode="json", exclude_unset=True)


class DataSection(Section):
    """Data, and their partition.

    source: user-defined files, which determine name and partition unless `name` and `partition` are given.
    client_test_fraction: share of each client's examples reserved for its own test. public_fraction: share of the training set
    that is public and belongs to no client. user_test_fraction: with natural users as clients, official splits that separate the
    users are pooled, and this share of each user's examples becomes the test set. features: built-in features, or the import path
    of a function that makes them, to replace the examples. handed_over: written by a run whose data or partition a program passed
    in; the other keys then only describe them.
    """

    name: str = "digits"
    source: Annotated[DataSource | None, PlainValidator(source_of), PlainSerializer(_source_keys)] = None
    partition: dict[str, Any] = Field(default_factory=lambda: {"kind": "iid", "clients": 10})
    data_dir: Annotated[str | None, FREE] = None
    download: Annotated[bool, FREE] = True
    client_test_fraction: float = Field(0.0, ge=0, lt=1)
    public_fraction: float = Field(0.0, ge=0, lt=1)
    user_test_fraction: float = Field(0.2, gt=0, lt=1)
    features: str | None = None
    handed_over: tuple[Literal["data", "partition"], ...] = ()

    @property
    def code(self) -> tuple[str, ...]:
        """Return the module, or the file, in the import path of the features."""
        return (self.features.rpartition(":")[0],) if self.features is not None and ":" in self.features else ()

    @field_validator("features")
    @classmethod
    def _whole(cls, features: str | None) -> str | None:
        """Make a path absolute, so that a run directory names the same file."""
        if features is None or ".py:" not in features:
            return features
        file, _, function = features.rpartition(":")
        return f"{whole_path(file)}:{function}"

    @model_validator(mode="before")
    @classmethod
    def _of_source(cls, section: Any) -> Any:
        """Fill in name and clients from the source, unless they are given."""
        if not isinstance(section, Mapping) or section.get("source") is None:
            return section
        source = source_of(section["source"])
        assert source is not None
        name = section.get("name", re.sub(r"[^\w.-]+", "-", source.main.stem))
        if name in CATALOGUE:
            raise ConfigError(f"data.name = {name!r} is a data set of fedveil, and data.source is another: choose another name")
        defaults = {"name": name, **({"partition": {"kind": "users"}} if source.by_client else {})}
        return {**defaults, **section, "source": source}


class PublicSection(Section):
    """Data declared to be public, which whiten the features.

    data: names of data sets, or `shapes`, pictures that a program draws. components: number of whitened features.
    """

    data: tuple[str, ...] = ()
    components: int = Field(400, ge=1)

    @field_validator("data", mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Accept a single name as a list of one, and refuse unknown names."""
        names = [data] if isinstance(data, str) else data
        for name in names if isinstance(names, list | tuple) else ():
            if name != SHAPES and (not isinstance(name, str) or name not in CATALOGUE):
                raise ConfigError(
                    f"public.data = {name!r}: unknown data set{nearest(str(name), [SHAPES, *CATALOGUE])}; there are {SHAPES}, "
                    f"{', '.join(CATALOGUE)}"
                )
        return names


class OptimizerSection(Section):
    """A first-order optimiser."""

    name: str = "sgd"
    lr: float = Field(0.1, gt=0, le=1e30)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)

    def spec(self) -> OptimizerSpec:
        """Return the specification with the section's values."""
        return OptimizerSpec(**self.model_dump())


class LocalOptimizer(OptimizerSection):
    """The optimiser of local training."""

    name: Literal["sgd", "adam"] = "sgd"


class ServerOptimizer(OptimizerSection):
    """The optimiser of the global model: FedAvgM (sgd with momentum), FedAdam, FedYogi.

    betas, eps: of adam and yogi. relative_to_clip: step along the aggregate divided by the round's clip.
    """

    name: Literal["sgd", "adam", "yogi"] = "sgd"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    relative_to_clip: bool = False

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        """Refuse betas and eps for optimisers that do not use them."""
        fields = type(self).model_fields
        unused = [key for key in ("betas", "eps") if getattr(self, key) != fields[key].default]
        if self.name == "sgd" and unused:
            raise ConfigError(
                f"training.server_optimizer.{unused[0]} belongs to 'adam' and 'yogi': leave it out with name = 'sgd'"
            )
        return self


class Training(Section):
    """Rounds and local training. `sampling` defaults to poisson if privacy can use it, else fixed.

    per_example: how a user-defined network and loss are called on single examples: by `torch.func.vmap`, or in a `loop`.
    client_timeout: seconds after which a client that has not answered is abandoned.
    measure_trained: measure each client's model after local training on the client's own test examples.
    personal_on_test_set: also measure personal models, if the run has any, on the whole test set.
    """

    rounds: int = Field(10, ge=1)
    clients_per_round: int | None = Field(None, ge=1)
    sampling: Literal["fixed", "poisson"] | None = None
    local_epochs: int = Field(1, ge=1)
    local_steps: int | None = Field(None, ge=1)
    batch_size: int = Field(32, ge=1)
    batch_clip: float | None = Field(None, gt=0, allow_inf_nan=False)
    schedule: Schedule = "constant"
    optimizer: LocalOptimizer = LocalOptimizer()
    server_optimizer: ServerOptimizer = ServerOptimizer(lr=1.0)
    local: Literal["sgd", "dp-sgd"] = "sgd"
    example_clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    per_example: Literal["vmap", "loop"] = "vmap"
    evaluate_every: int = Field(1, ge=0)
    max_update_norm: float = Field(1e6, gt=0)
    client_timeout: Annotated[float | None, FREE] = Field(None, gt=0, allow_inf_nan=False)
    measure_trained: bool = False
    personal_on_test_set: bool = False


class SelectionSection(Section):
    """Record of how the run was chosen among runs of equal price; written by `fedveil tune --private` and `--unaccounted`.

    runs: their expected number, or without a shape the number that was compared. shape: of the negative binomial law of a secret
    number of runs; 0 is logarithmic. score_noise: noise multiplier of the clients' score; None if public data score.
    """

    runs: float = Field(ge=1, lt=1e6)
    shape: float | None = Field(None, gt=-1, le=100)
    score_noise: float | None = Field(None, gt=0, le=1e9)

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        """Refuse impossible numbers."""
        self.spec()
        return self

    def spec(self) -> Selection:
        """Return the specification with the section's values."""
        return Selection(**self.model_dump())


class EvaluationSection(Section):
    """Counts of the global model's right and wrong answers on each client's own test examples, included in its release.

    share: of each release's mu squared that the counts get; without effect under DP-SGD. examples: most examples of a client
    that count, a public number.
    """

    share: float | None = Field(None, gt=0, lt=1)
    examples: int = Field(ge=1, le=10**9)

    def spec(self, *, dp_sgd: bool) -> EvaluationCounts:
        """Return the specification with the section's values.

        Raises:
            ConfigError: the share is missing, and the update has to give one.
        """
        if self.share is None and not dp_sgd:
            raise ConfigError(
                "privacy.evaluation.share: missing; it is the part of each release's privacy, in mu squared, that counts get: "
                "set it to a number between 0 and 1, such as 0.1"
            )
        return EvaluationCounts(0.0 if dp_sgd or self.share is None else self.share, self.examples)


class NoiseCohortSection(Section):
    """A larger federation whose noise is simulated here, an extrapolation: its clients, cohort and epsilon."""

    clients: int = Field(ge=1, le=10**12)
    clients_per_round: int = Field(ge=1, le=10**12)
    epsilon: float = Field(gt=0, allow_inf_nan=False)

    def spec(self) -> NoiseCohort:
        """Return the specification with the section's values."""
        return NoiseCohort(**self.model_dump())


class Privacy(Section):
    """The guarantee. Give epsilon (the noise is calibrated) or noise_multiplier (epsilon is the result), not both.

    budget: ledger of a lifetime budget that this run shares with others (`fedveil budget create`).
    selection: this run was chosen among several; the guarantee is then that of the whole search.
    grid_bits: grid steps in one noise std, as a power of two; by default the method's own. It costs no privacy.
    evaluation: clients report with noise how well the global model does on examples reserved from training.
    noise_place: the noise of a sum is added once to the `sum`, or by each client in `shares`, as under secure aggregation.
    spare_attempts: releases beyond the rounds that are paid for, since an attempt at a sum may fail; only with shares.
    noise_cohort: instead of both, the noise of a larger federation: a simulation, whose statement has the true epsilon.
    """

    epsilon: float | None = Field(None, gt=0, allow_inf_nan=False)
    noise_multiplier: float | None = Field(None, ge=0, le=1e9)
    delta: float = Field(1e-5, gt=0, lt=1)
    unit: Unit = Unit.CLIENT
    adjacency: Adjacency = Adjacency.ZERO_OUT
    view: View = View.AGGREGATE
    allow_vacuous_delta: bool = False
    min_survivors: int | None = Field(None, ge=1)
    colluders: int = Field(0, ge=0)
    noise_place: NoisePlace = "sum"
    spare_attempts: int | None = Field(None, ge=0)
    max_participations: int | None = Field(None, ge=1)
    budget: str | None = Field(None, min_length=1)
    selection: SelectionSection | None = None
    grid_bits: int | None = Field(None, ge=0, le=MAX_BITS)
    evaluation: EvaluationSection | None = None
    noise_cohort: NoiseCohortSection | None = None

    @field_validator("budget")
    @classmethod
    def _whole(cls, budget: str | None) -> str | None:
        """Make the path absolute, so that a run directory names the same file."""
        return None if budget is None else whole_path(budget)


class RunSection(Section):
    """How to run. seeded_noise makes the noise reproducible, and therefore no protection: simulation only.

    final_model: the model that is released and scored: the last one, the mean over the last third of the rounds (tail), or the
    exponential moving average.
    plugins: files or modules with user-defined methods, tasks and data sets, whose contents are compared by their digests.
    track: trackers that follow the run.
    isolation: where user-defined code sees a client's data: in a process forked for the client (`process`, the default if one can
    be forked), with another process for each DP-SGD pass over single examples (`pass`), or on a fresh copy of model, task and
    method in this process (`copy`).
    secure_aggregation: pairwise masks, so that the server learns nothing but the sum: `on` in a deployment, `simulate` here.
    """

    seed: int = Field(0, ge=0, lt=2**62)
    seeded_noise: bool = False
    engine: Annotated[str, FREE] = "auto"
    clients_at_once: Annotated[int | None, FREE] = Field(None, ge=1)
    precision: Precision = "float32"
    final_model: FinalModel = "last"
    deterministic: Annotated[bool, FREE] = False
    isolation: Annotated[Literal["process", "pass", "copy"] | None, FREE] = None
    secure_aggregation: SecureAggregation = "none"
    name: Annotated[str, FREE] = ""
    plugins: Annotated[tuple[str, ...], FREE] = ()
    track: Annotated[tuple[str, ...], FREE] = ()

    @field_validator("plugins")
    @classmethod
    def _whole(cls, plugins: tuple[str, ...]) -> tuple[str, ...]:
        """Make paths absolute, so that a run directory finds them again."""
        return tuple(whole_path(p) if p.endswith(".py") else p for p in plugins)


class PluginMethod(MethodConfig):
    """The section `method` of a method that is not imported yet: reading a configuration imports no code of others."""

    model_config = ConfigDict(extra="allow")


def method_section_of(section: Any) -> MethodConfig:
    """Return the method that a section describes, or a `PluginMethod` if a plugin may provide it.

    Raises:
        ConfigError: no name, an unknown parameter, an impossible value.
    """
    if isinstance(section, type) and issubclass(section, MethodConfig):
        return section()  # type: ignore[call-arg]
    if isinstance(section, MethodConfig):
        return section
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise ConfigError(f"method = {section!r} is not a section: give one with the key name, such as name = 'dp-fedavg'")
    if not METHODS.ready(section["name"]):
        return PluginMethod(**section)
    return cast(MethodConfig, method_from(dict(section)))


class PluginTask(Task):
    """The section `task` of a task that is not imported yet: reading a configuration imports no code of others."""

    model_config = ConfigDict(extra="allow")


def task_section_of(section: Any) -> Task:
    """Return the task that a section or a name describes, or a `PluginTask` if a plugin may provide it.

    A program may pass in a task or its class; a user-defined one is then registered.

    Raises:
        ConfigError: no name, an unknown constant, an impossible value.
    """
    if isinstance(section, type) and issubclass(section, Task):
        section = {"name": register_task(section).model_fields["name"].default}
    if isinstance(section, Task):
        if not isinstance(section, PluginTask) and not (TASKS.ready(section.name) and TASKS[section.name] is type(section)):
            register_task(type(section))
        return section
    options = {"name": section} if isinstance(section, str) else section
    if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
        raise ConfigError(f"task = {section!r} is not a section: give one with the key name, such as name = 'regression'")
    return task_from(options) if TASKS.ready(options["name"]) else PluginTask(**options)


def given_keys(named: MethodConfig | Task) -> dict[str, Any]:
    """Return the given keys of the section `method` or `task`."""
    return {"name": named.name, **named.model_dump(mode="json", exclude_unset=True)}
