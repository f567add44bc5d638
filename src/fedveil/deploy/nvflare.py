"""Differential privacy in jobs of NVFlare: a filter for what a site's training moved, and an aggregator that noises the sum.

    recipe.add_client_output_filter(ReleaseFilter(clip=1.0, epsilon=8.0, delta=1e-5, rounds=10, clients=12, ledger="~/fedveil"))

`ReleaseFilter` noises each site's result at the site, charges the site's ledger, and answers in the form of the result with
nothing else in it (server view). A result that it does not understand is refused: NVFlare then sends an error code alone.

`NoisyAggregator` is for a server that is trusted with the updates, and adds noise once (aggregate view). It records the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType, ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.job_config.defs import FilterType, JobTargetType

from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.data.catalogue import Info
from fedveil.deploy.app_arrays import unfit
from fedveil.deploy.nvflare_weights import UNTOUCHED, Instruction, SentWeights
from fedveil.errors import BudgetExhausted, ConfigError, UpdateRefused
from fedveil.experiment.public_setting import NVFLARE_JOB
from fedveil.ledger.files import owner_only_folder
from fedveil.platforms.releaser import Releaser, federation_setting
from fedveil.statement.statement_layout import to_markdown

if TYPE_CHECKING:
    from fedveil.deploy.app_arrays import Floats
    from fedveil.deploy.central_dp import AppRun
    from fedveil.deploy.nvflare_weights import Arrays
    from fedveil.experiment.config import Config
    from fedveil.statement.statement_layout import PrintedStatement

_REFERENCE = "fedveil.reference"
"""Private property of a task's context: the model that came with the task, or the task's identifier once it is used."""
_RELEASED: WeakValueDictionary[tuple[Any, int], Shareable] = WeakValueDictionary()
"""Releases on their way out, by task and address: a second ReleaseFilter behind the first one adds nothing."""
_BESIDE = (
    "what the filter does not see leaves without noise, and no epsilon covers it: results of tasks that it is not configured for "
    "(validate and submit_model of cross-site evaluation), federation events (metrics of SummaryWriter, streamed logs), error "
    "codes of training that fails, and results of workflows to which NVFlare applies no result filter (ccwf, collab)"
)
_DATA = Info(NVFLARE_JOB, "", (1,), 1, 0, 0, 0, "the sites of an NVFlare job, unseen", False, (0.0,), (1.0,), 1.0)
"""Placeholder for data about which fedveil knows nothing."""
_PAGE = """\
# A run of an NVFlare job

Aggregator: fedveil's NoisyAggregator. Sites' updates were clipped at the server, which saw each of them before the noise, and who
took part: the statement assumes that it is trusted with both. One site is one client.

Metrics and numbers of examples that sites send are not used here. Other components of the server (model selection, metrics files,
statistics, logs) may read and publish them without clip or noise, and the guarantee does not cover that.

How sites train, and on what, fedveil does not know.
"""
_SHOWN = 6
_log = logging.getLogger(__name__)


class _JobReleases(NamedTuple):
    """Releases of a site in one job; names of arrays and form of the result are those of the first result."""

    names: list[str]
    form: str
    releaser: Releaser


class ReleaseFilter(Filter):  # type: ignore[misc]
    """Filter that releases the weights in a task's result with the site's own noise, and charges the site's ledger.

    Args:
        clip: C, L2 bound on what training moved. epsilon, delta: total of all releases of the site, over its lifetime. rounds:
            number of these releases. clients: number of sites of the federation.
        ledger: folder of the site's ledger, SITE.ledger; an absolute path or one that begins with ~.
        untouched: last name parts of arrays that are sent back as they came, whatever their type.

    Raises:
        ConfigError: a number is impossible, or the path is relative.
    """

    def __init__(
        self,
        clip: float,
        epsilon: float,
        delta: float,
        rounds: int,
        clients: int,
        ledger: str,
        untouched: Sequence[str] = UNTOUCHED,
    ) -> None:
        super().__init__()
        _require(View.SERVER, {"ledger": ledger}, clip=clip, epsilon=epsilon, delta=delta, rounds=rounds, clients=clients)
        self.clip, self.epsilon, self.delta, self.rounds, self.clients = clip, epsilon, delta, rounds, clients
        self.ledger, self.untouched = ledger, untouched
        self._parameters: dict[str, frozenset[str]] = {}
        self._releasers: dict[str, _JobReleases] = {}

    def get_job_target_type(self) -> str:
        """Return the kind of machine that it is for; NVFlare refuses it elsewhere."""
        return str(JobTargetType.CLIENT)

    def add_to_fed_job(self, job: Any, ctx: Any, filter_type: str = FilterType.TASK_RESULT, tasks: Any = None) -> None:
        """Add this filter to a job, for results of the tasks that are named; by default those of "train".

        Raises:
            ConfigError: it would never run.
        """
        if filter_type != FilterType.TASK_RESULT:
            raise ConfigError("a ReleaseFilter filters task results, and copies the models that come with these tasks by itself")
        tasks = ["train"] if tasks is None else list(tasks)
        if problem := _never_runs(tasks):
            raise ConfigError(problem)
        job.set_app_packages([*job.job.app_packages, "fedveil"])  # installed at the sites, and not sent with the job
        job.add_filter(obj=self, filter_type=filter_type, tasks=tasks, ctx=ctx)

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """At the start of a job, join the task-data filters of the same tasks; end a job for which the filter would never run."""
        if event_type != EventType.START_RUN:
            return
        runner = fl_ctx.get_prop(FLContextKey.RUNNER)
        tasks = [key.partition(FilterKey.DELIMITER)[0] for key, chain in runner.task_result_filters.items() if self in chain]
        if problem := _never_runs(tasks):
            self.system_panic(problem, fl_ctx)
        for task in tasks:
            chain = runner.task_data_filters.setdefault(f"{task}{FilterKey.DELIMITER}{FilterKey.IN}", [])
            if not any(isinstance(one, ReleaseFilter) for one in chain):
                chain.append(self)

    def process(self, shareable: Shareable, fl_ctx: Any) -> Shareable:
        """Copy the model of an instruction; or return the release in the place of a result.

        Raises:
            FedveilError: the result is refused. The message has names, types and shapes, and no values.
        """
        if fl_ctx.get_prop(FLContextKey.PROCESS_TYPE) == ProcessType.SERVER_JOB:
            raise UpdateRefused("a ReleaseFilter is for sites: at the server, results have already left them")
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN:
            return self._kept(shareable, fl_ctx)
        instruction, task = fl_ctx.get_prop(_REFERENCE), fl_ctx.get_prop(FLContextKey.TASK_ID)
        if _RELEASED.get((task, id(shareable))) is shareable:
            return shareable
        fl_ctx.set_prop(_REFERENCE, task, private=True, sticky=False)
        if shareable.get_return_code() != ReturnCode.OK:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)  # as NVFlare answers where the executor raises
        if instruction is not None and instruction == task:
            raise UpdateRefused(
                "a ReleaseFilter before this one has released the result, and a filter between them has replaced it: keep one of "
                "them, the one in the site's privacy.json if there is one"
            )
        if not isinstance(instruction, Instruction) or instruction.task != task:
            raise UpdateRefused(
                f"no model is known for the task {fl_ctx.get_prop(FLContextKey.TASK_NAME)!r}, so nothing can be released: in "
                f"privacy.json, put a ReleaseFilter into task_data_filters, too"
            )
        return self._released(shareable, instruction, fl_ctx)

    def statement(self, job: str) -> PrintedStatement:
        """Return the privacy statement of the site's releases in a job, after the first."""
        made = self._releasers[job].releaser.statement
        return replace(made, warnings=(*made.warnings, _BESIDE))

    def _kept(self, shareable: Shareable, fl_ctx: Any) -> Shareable:
        """Copy the model; without one, whatever comes back is refused."""
        fl_ctx.set_prop(_REFERENCE, None, private=True, sticky=False)
        try:
            weights, job = SentWeights.of(from_shareable(shareable)), fl_ctx.get_job_id()
        except (ValueError, UpdateRefused):
            return shareable
        task = fl_ctx.get_prop(FLContextKey.TASK_ID)
        instruction = Instruction.of(weights.values, task, self._parameters.get(job), self.untouched)
        self._parameters[job] = instruction.parameters
        instruction = replace(instruction, members=weights.members)
        fl_ctx.set_prop(_REFERENCE, instruction, private=True, sticky=False)
        return shareable

    def _released(self, shareable: Shareable, instruction: Instruction, fl_ctx: Any) -> Shareable:
        """Return a result with the release and nothing else."""
        try:
            weights = SentWeights.of(from_shareable(shareable))
        except ValueError as problem:
            raise UpdateRefused("the result is no DXO, and a ReleaseFilter releases the weights in one") from problem
        moved = instruction.moved(weights)
        names = [name for name in instruction.arrays if name in weights.values]
        if (job := fl_ctx.get_job_id()) not in self._releasers:
            releaser = self._releaser(fl_ctx.get_identity_name(), moved)
            self._releasers[job] = _JobReleases(names, weights.form, releaser)
        first = self._releasers[job]
        if odd := sorted(set(names) ^ set(first.names))[:_SHOWN]:
            raise UpdateRefused(f"the result has other arrays than the first one of this job: {odd}")
        if weights.form != first.form:
            raise UpdateRefused(f"the result is sent as {weights.form}, and the first one of this job as {first.form}")
        releaser = first.releaser
        try:
            left = releaser(moved)
        except UpdateRefused as problem:  # it depends on values, so that a refusal would tell something about the data
            self.log_warning(fl_ctx, f"{problem}; a noised zero is released in its place, and charged")
            left = releaser(None)
        page = Path(releaser.ledger).with_suffix(".md")
        if not page.exists():
            page.write_text(to_markdown(self.statement(job)), encoding="utf-8")
            self.log_info(fl_ctx, f"the first release is charged to {releaser.ledger}; {page.name} states what is promised")
        answer = weights.wrapped(instruction.answered(names, left, full=weights.full)).to_shareable()
        _RELEASED[instruction.task, id(answer)] = answer
        return answer

    def _releaser(self, site: str, moved: Arrays) -> Releaser:
        """Return the releaser of a site, for updates with these arrays."""
        if Path(site).name != site:
            raise ConfigError(f"the site name {site!r} is not possible as the name of a ledger")
        file = owner_only_folder(Path(self.ledger).expanduser()) / f"{site}.ledger"
        numbers: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta, "rounds": self.rounds, "clients": self.clients}
        return Releaser(self.clip, **numbers, ledger=file, like=moved)


class NoisyAggregator(ModelAggregator):  # type: ignore[misc]
    """Aggregator that releases the noisy mean of a round's updates, and writes a run directory.

    Every site takes part in every round; one that fails, or answers with something else, counts as zero.

    Args:
        clip: C, L2 bound on a site's update. epsilon, delta: of the whole run. rounds: T. clients: N, the number of sites, by
            which every sum is divided.
        out: the run directory, which must be new; an absolute path or one that begins with ~.

    Raises:
        ConfigError: a number is impossible, or the path is relative.
    """

    def __init__(self, clip: float, epsilon: float, delta: float, rounds: int, clients: int, out: str) -> None:
        super().__init__()
        _require(View.AGGREGATE, {"out": out}, clip=clip, epsilon=epsilon, delta=delta, rounds=rounds, clients=clients)
        self.clip, self.epsilon, self.delta, self.rounds, self.clients, self.out = clip, epsilon, delta, rounds, clients, out
        self._run: AppRun | None = None
        self._instruction: Instruction | None = None
        self._places: dict[str, int] = {}
        self._updates: dict[int, Floats] = {}
        self._failures: dict[int, str] = {}
        self._full: bool | None = None

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Copy the model that goes out with a task, before the server's own filters; close the run at the end of the job."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.BEFORE_TASK_DATA_FILTER:
            try:
                weights = SentWeights.of(from_shareable(fl_ctx.get_prop(FLContextKey.TASK_DATA)))
            except (ValueError, UpdateRefused):
                return
            known = self._instruction.parameters if self._instruction is not None else None
            self._instruction = Instruction.of(weights.values, fl_ctx.get_prop(FLContextKey.TASK_NAME), known)
        elif event_type == EventType.END_RUN and self._run is not None:
            done = len(self._run.history)
            early = "" if done == self.rounds else f"the job ended after {done} of {self.rounds} rounds"
            _log.info("closing digest of %s: %s", self.out, self._run.end(early))
            self._run = None

    def reset_stats(self) -> None:
        """Forget the updates of the last round."""
        self._updates, self._failures = {}, {}

    def accept_model(self, model: FLModel) -> None:
        """Keep a site's update; one that may not be released counts as zero."""
        site = (model.meta or {}).get("client_name") or self.fl_ctx.get_peer_context().get_identity_name()
        place = self._places.setdefault(site, len(self._places))
        if place >= self.clients or place in self._updates or place in self._failures:
            _log.warning("a result of %s is ignored: clients = %d, and each answers once per round", site, self.clients)
            return
        full = model.params_type != ParamsType.DIFF
        self._full = full if self._full is None else self._full  # answers have the form of the run's first result
        try:
            vector = self._vector(SentWeights(model.params or {}, full, model.meta or {}, _unwrapped))
            if problem := unfit(vector):
                raise UpdateRefused(problem)
            self._updates[place] = vector
        except UpdateRefused as problem:
            self._failures[place] = str(problem)
            _log.warning("the result of %s counts as zero: %s", site, problem)

    def aggregate_model(self) -> FLModel:
        """Return the model after the noisy mean, or the mean itself where sites send differences; it is charged before.

        Raises:
            BudgetExhausted: the rounds that the noise is for are spent.
        """
        run, instruction = self._begun(), self._instruction
        assert instruction is not None
        done, zero = len(run.history), np.zeros(run.setting.layout.dimension, np.float32)
        if not run.admits():
            raise BudgetExhausted(f"round {done}: the {self.rounds} rounds that the noise is for are spent")
        absent = {place: "no result" for place in range(self.clients) if place not in self._updates}
        mean = run.release(done, [self._updates.get(n, zero) for n in range(self.clients)], absent | self._failures)
        parts = np.split(mean, np.cumsum(run.setting.layout.sizes)[:-1])
        named = dict(zip(run.setting.layout.names, parts, strict=True))
        left = {name: part.reshape(instruction.arrays[name].shape) for name, part in named.items()}
        full = self._full is not False
        kind = ParamsType.FULL if full else ParamsType.DIFF
        return FLModel(kind, instruction.answered(list(instruction.arrays), left, full=full), meta={})

    def _begun(self) -> AppRun:
        from fedveil.deploy.central_dp import AppRun

        if self._instruction is None:
            raise ConfigError("no model went out to the sites before a result came in")
        if self._run is None:
            path, config = Path(self.out).expanduser(), self._config()
            self._run = AppRun.begin(path, config, self.clients, _PAGE, _DATA)
        return self._run

    def _config(self) -> Config:
        from fedveil.deploy.central_dp import matching_configuration
        from fedveil.training.params import Layout

        assert self._instruction is not None
        shapes = {n: a.shape for n, a in self._instruction.arrays.items() if n in self._instruction.parameters}
        sections: dict[str, dict[str, Any]] = {
            "method": {"name": "dp-fedavg", "clip": self.clip},
            "training": {"rounds": self.rounds, "clients_per_round": self.clients, "sampling": "fixed"},
            "privacy": {"epsilon": self.epsilon, "delta": self.delta, "view": "aggregate"},
            "run": {"seed": 0, "seeded_noise": False},
        }
        return matching_configuration(sections, self.clients, Layout.of(shapes), data=_DATA)

    def _vector(self, weights: SentWeights) -> Floats:
        """Return by how much training moved all parameters, as one vector; parameters that a result lacks did not move."""
        assert self._instruction is not None
        moved, arrays = self._instruction.moved(weights), self._instruction.arrays
        parts = [moved.get(n, np.zeros(a.shape, np.float32)) for n, a in arrays.items() if n in self._instruction.parameters]
        return np.concatenate([part.reshape(-1) for part in parts])


def _never_runs(tasks: Sequence[str]) -> str:
    """Return why a filter for these tasks would not run, or an empty string."""
    if any("*" in task for task in tasks):
        return f"tasks = {list(tasks)}: NVFlare compares names of tasks exactly, so that this filter would never run: name each"
    return ""


def _require(view: View, paths: Mapping[str, str], **numbers: Any) -> None:
    """Refuse arguments that are impossible where a job is written, and not only where it runs."""
    federation_setting(**numbers, scope=Scope(Unit.CLIENT, Adjacency.ZERO_OUT, view))
    for key, path in paths.items():
        if not Path(path).expanduser().is_absolute():
            raise ConfigError(f"{key} = {path!r}: give an absolute path or one with ~; NVFlare runs jobs in folders of its own")


def _unwrapped(values: dict[str, Any]) -> DXO:
    return DXO(DataKind.WEIGHTS, values)
