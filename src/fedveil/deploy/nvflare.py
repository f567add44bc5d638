"""Differential privacy in jobs of NVFlare: a filter for what a site's training moved, with the site's own noise (server view).

    recipe.add_client_output_filter(ReleaseFilter(clip=1.0, epsilon=8.0, delta=1e-5, rounds=10, clients=12, ledger="~/fedveil"))

The filter copies the model that comes with a task, since NVFlare forgets it before results are filtered. It releases the
difference through a `Releaser`, which charges the site's ledger, and answers in the form of the result with nothing else in it. A
result that it does not understand is refused: NVFlare then sends an error code alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModelConst, ParamsType
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.job_config.defs import FilterType

from fedveil.errors import ConfigError, UpdateRefused
from fedveil.ledger.files import owner_only_folder
from fedveil.platforms.releaser import Releaser
from fedveil.statement.statement_layout import to_markdown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.statement.statement_layout import PrintedStatement

    Arrays = dict[str, NDArray[Any]]

UNTOUCHED = ("num_batches_tracked",)
"""Last name parts of arrays that are not parameters; averaging turns them from integers into floats."""
_REFERENCE = "fedveil.reference"
"""Private property of a task's context: the model that came with the task."""
_BESIDE = (
    "what the filter does not see leaves without noise, and no epsilon covers it: results of tasks that it is not configured for "
    "(validate and submit_model of cross-site evaluation), federation events (metrics of SummaryWriter, streamed logs), error "
    "codes of training that fails, and results of workflows to which NVFlare applies no result filter (ccwf, collab)"
)
_SHOWN = 6


@dataclass(frozen=True)
class Weights:
    """Weights in a DXO.

    Args:
        values: arrays or tensors by name. full: whether they are weights, and not a difference of weights.
        meta: properties of the DXO. wrapped: returns a DXO of the same form around other values.
    """

    values: Mapping[str, Any]
    full: bool
    meta: Mapping[str, Any]
    wrapped: Callable[[dict[str, Any]], DXO]

    @classmethod
    def of(cls, dxo: DXO) -> Weights:
        """Return the weights of a DXO; those of an FL_MODEL, and the one member of a COLLECTION, are unwrapped.

        Raises:
            UpdateRefused: it holds something else, or weights and something else.
        """
        meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}
        if dxo.data_kind == DataKind.COLLECTION and len(dxo.data) == 1:
            ((name, member),) = dxo.data.items()
            inner = cls.of(member)
            return replace(inner, wrapped=lambda values: DXO(DataKind.COLLECTION, {name: inner.wrapped(values)}))
        if dxo.data_kind == DataKind.FL_MODEL and not dxo.data.get(FLModelConst.OPTIMIZER_PARAMS):
            model, kind = dxo.data, ParamsType(dxo.data.get(FLModelConst.PARAMS_TYPE) or ParamsType.FULL)
            same = {FLModelConst.PARAMS_TYPE: kind, FLModelConst.META: meta}
            form = lambda values: DXO(DataKind.FL_MODEL, {**same, FLModelConst.PARAMS: values})  # noqa: E731
            return cls(model.get(FLModelConst.PARAMS) or {}, kind is ParamsType.FULL, model.get(FLModelConst.META) or {}, form)
        if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
            raise UpdateRefused(
                f"the data are of the kind {dxo.data_kind!r}, and a ReleaseFilter releases WEIGHTS or WEIGHT_DIFF, alone in a "
                f"COLLECTION or in an FL_MODEL without optimizer_params"
            )
        kind = DataKind(dxo.data_kind)
        return cls(dxo.data, kind is DataKind.WEIGHTS, dxo.meta or {}, lambda values: DXO(kind, values, dict(meta)))


@dataclass(frozen=True)
class Instruction:
    """The model that came with a task.

    Args:
        task: its identifier. arrays: copies as numpy arrays. types: of the arrays or tensors as they came.
        parameters: names of the arrays that had finite floats in the first model of the job.
    """

    task: Any
    arrays: Arrays
    types: Mapping[str, Any]
    parameters: frozenset[str]

    def answered(self, names: Sequence[str], left: Arrays, *, full: bool) -> dict[str, Any]:
        """Return an answer with these names, in the types that came: released differences, and for other arrays no change.

        Args:
            full: whether the answer has weights, and not their differences.
        """
        answer = {}
        for name in names:
            array = self.arrays[name] if full else np.zeros_like(self.arrays[name])
            with np.errstate(all="ignore"):
                answer[name] = _typed(array + left[name].astype(np.float64) if name in left else array, self.types[name])
        return answer


class ReleaseFilter(Filter):  # type: ignore[misc]
    """Filter that releases the weights in a task's result with the site's own noise, and charges the site's ledger.

    Args:
        clip: C, L2 bound on what training moved. epsilon, delta: total of all releases of the site, over its lifetime. rounds:
            number of these releases. clients: number of sites of the federation.
        ledger: folder of the site's ledger, SITE.ledger; an absolute path or one that begins with ~.
        untouched: last name parts of arrays that are sent back as they came, whatever their type.
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
        if not Path(ledger).expanduser().is_absolute():
            raise ConfigError(f"ledger = {ledger!r}: give an absolute path or one with ~, since NVFlare starts jobs in folders")
        self.clip, self.epsilon, self.delta, self.rounds, self.clients = clip, epsilon, delta, rounds, clients
        self.ledger, self.untouched = ledger, untouched
        self._parameters: dict[str, frozenset[str]] = {}
        self._releasers: dict[str, tuple[list[str], Releaser]] = {}

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
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN:
            return self._kept(shareable, fl_ctx)
        instruction = fl_ctx.get_prop(_REFERENCE)
        fl_ctx.set_prop(_REFERENCE, None, private=True, sticky=False)
        if shareable.get_return_code() != ReturnCode.OK:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)  # as NVFlare answers where the executor raises
        if instruction is None or instruction.task != fl_ctx.get_prop(FLContextKey.TASK_ID):
            raise UpdateRefused(
                f"no model is known that came with the task {fl_ctx.get_prop(FLContextKey.TASK_NAME)!r}, so that nothing can be "
                f"released: in privacy.json, put a ReleaseFilter into task_data_filters, too"
            )
        return self._released(shareable, instruction, fl_ctx)

    def statement(self, fl_ctx: Any) -> PrintedStatement:
        """Return the privacy statement of the site's releases in this job, after the first."""
        made = self._releasers[fl_ctx.get_job_id()][1].statement
        return replace(made, warnings=(*made.warnings, _BESIDE))

    def _kept(self, shareable: Shareable, fl_ctx: Any) -> Shareable:
        """Copy the model, since training may change its arrays in place; without a model, whatever comes back is refused."""
        fl_ctx.set_prop(_REFERENCE, None, private=True, sticky=False)
        try:
            weights = Weights.of(from_shareable(shareable))
        except (ValueError, UpdateRefused):
            return shareable
        arrays = {name: _array(name, value) for name, value in weights.values.items()}
        released = {n for n, a in arrays.items() if a.dtype.kind == "f" and n.rpartition(".")[2] not in self.untouched}
        finite = frozenset(n for n in released if np.isfinite(arrays[n]).all())
        parameters = self._parameters.setdefault(fl_ctx.get_job_id(), finite)
        if odd := sorted(parameters - finite)[:_SHOWN]:
            raise UpdateRefused(f"the model has no finite floating-point values in {odd}, and had them before: it has diverged")
        types = {name: getattr(value, "dtype", arrays[name].dtype) for name, value in weights.values.items()}
        kept = Instruction(fl_ctx.get_prop(FLContextKey.TASK_ID), arrays, types, parameters)
        fl_ctx.set_prop(_REFERENCE, kept, private=True, sticky=False)
        return shareable

    def _released(self, shareable: Shareable, instruction: Instruction, fl_ctx: Any) -> Shareable:
        """Return a result with the release and nothing else."""
        try:
            weights = Weights.of(from_shareable(shareable))
        except ValueError as problem:
            raise UpdateRefused("the result is no DXO, and a ReleaseFilter releases the weights in one") from problem
        moved = _moved(weights, instruction)
        names = [name for name in instruction.arrays if name in weights.values]
        if (job := fl_ctx.get_job_id()) not in self._releasers:
            self._releasers[job] = names, self._releaser(fl_ctx.get_identity_name(), moved)
        first, releaser = self._releasers[job]
        if names != first:
            odd = sorted(set(names) ^ set(first))[:_SHOWN]
            raise UpdateRefused(f"the result has other arrays than the first one of this job: {odd}")
        try:
            left = releaser(moved)
        except UpdateRefused as problem:  # it depends on values, so that a refusal would tell something about the data
            self.log_warning(fl_ctx, f"{problem}; a noised zero is released in its place, and charged")
            left = releaser(None)
        self._tell(releaser, fl_ctx)
        return weights.wrapped(instruction.answered(names, left, full=weights.full)).to_shareable()

    def _releaser(self, site: str, moved: Arrays) -> Releaser:
        """Return the releaser of a site, for updates with these arrays."""
        folder = Path(self.ledger).expanduser()
        if Path(site).name != site:
            raise ConfigError(f"the site name {site!r} is not possible as the name of a ledger")
        owner_only_folder(folder)
        numbers = {"epsilon": self.epsilon, "delta": self.delta, "rounds": self.rounds, "clients": self.clients}
        return Releaser(self.clip, **numbers, ledger=folder / f"{site}.ledger", like=moved)

    def _tell(self, releaser: Releaser, fl_ctx: Any) -> None:
        """Write the statement beside the ledger after the first release."""
        page = Path(releaser.ledger).with_suffix(".md")
        if not page.exists():
            page.write_text(to_markdown(self.statement(fl_ctx)), encoding="utf-8")
            self.log_info(fl_ctx, f"the first release is charged to {releaser.ledger}; {page.name} states what is promised")


def _never_runs(tasks: Sequence[str]) -> str:
    """Return why a filter for these tasks would not run, or an empty string."""
    if any("*" in task for task in tasks):
        return (
            f"tasks = {list(tasks)}: NVFlare compares the names of tasks exactly, so that this filter would never run: name each"
        )
    return ""


def _array(name: str, value: Any) -> NDArray[Any]:
    """Return a copy of an array or tensor as a numpy array.

    Raises:
        UpdateRefused: it is neither, or complex.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor).numpy()
    if not isinstance(value, np.ndarray | np.generic | float) or np.asarray(value).dtype.kind not in "fiub":
        raise UpdateRefused(f"{name!r} must be an array or a tensor of real numbers, got {type(value).__name__}")
    return np.array(value, subok=False)


def _typed(array: NDArray[Any], kind: Any) -> Any:
    """Return an array in a type of numpy, or as a tensor in a type of torch."""
    if isinstance(kind, np.dtype):
        return np.asarray(array, kind)
    return sys.modules["torch"].from_numpy(np.array(array)).to(kind)


def _moved(weights: Weights, instruction: Instruction) -> Arrays:
    """Return by how much training moved each parameter in a result, in the order of the instruction.

    Raises:
        UpdateRefused: the result does not fit to the instruction, regardless of its values.
    """
    if AlgorithmConstants.SCAFFOLD_CTRL_DIFF in weights.meta:
        raise UpdateRefused("SCAFFOLD sends a second vector, the change of its control term, that a ReleaseFilter does not cover")
    if weights.meta.get(MetaKey.PROCESSED_ALGORITHM):
        raise UpdateRefused(
            f"the result is already processed by {weights.meta[MetaKey.PROCESSED_ALGORITHM]!r}: put the ReleaseFilter before it"
        )
    if unknown := [name for name in weights.values if name not in instruction.arrays]:
        raise UpdateRefused(f"the result has arrays that the model of the task has not: {unknown[:_SHOWN]}")
    moved = {}
    for name, before in instruction.arrays.items():
        if name not in weights.values or name not in instruction.parameters:
            continue
        after = _array(name, weights.values[name])
        if after.dtype.kind != "f" or after.shape != before.shape:
            raise UpdateRefused(
                f"{name!r} came as {before.dtype} of shape {before.shape}, and went back as {after.dtype} of shape {after.shape}"
            )
        with np.errstate(all="ignore"):
            change = after.astype(np.float64) - (before.astype(np.float64) if weights.full else 0)
            moved[name] = np.asarray(change, np.float32)
    if not moved:
        raise UpdateRefused(f"the result has none of the model's parameters {sorted(instruction.parameters)[:_SHOWN]}")
    return moved
