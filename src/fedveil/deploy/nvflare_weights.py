"""Weights in NVFlare's data exchange objects: the model that comes with a task, by how much training moved it, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey
from nvflare.app_common.abstract.fl_model import FLModelConst, ParamsType
from nvflare.app_common.app_constant import AlgorithmConstants

from fedveil.errors import UpdateRefused

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

UNTOUCHED = ("num_batches_tracked",)
"""Last name parts of arrays that are not parameters; averaging turns them from integers into floats."""
_META = {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}
"""Properties of an answer: every site has the same weight."""
_SHOWN = 6


@dataclass(frozen=True)
class SentWeights:
    """Weights in a DXO.

    Args:
        values: arrays or tensors by name. full: whether they are weights, and not differences of weights.
        meta: properties of the DXO. wrapped: returns a DXO of the same form around other values, and with nothing else.
        members: names of the COLLECTIONs around them, outermost first. form: the kind of data that the weights are sent as.
    """

    values: Mapping[str, Any]
    full: bool
    meta: Mapping[str, Any]
    wrapped: Callable[[dict[str, Any]], DXO]
    members: tuple[str, ...] = ()
    form: str = ""

    @classmethod
    def of(cls, dxo: DXO) -> SentWeights:
        """Return the weights of a DXO; those of an FL_MODEL, and the one member of a COLLECTION, are unwrapped.

        Raises:
            UpdateRefused: it holds something else, or weights and something else.
        """
        if dxo.data_kind == DataKind.COLLECTION and len(dxo.data) == 1:
            ((name, member),) = dxo.data.items()
            inner = cls.of(member)
            wrapped = inner.wrapped
            return replace(
                inner, wrapped=lambda values: DXO(DataKind.COLLECTION, {name: wrapped(values)}), members=(name, *inner.members)
            )
        if dxo.data_kind == DataKind.FL_MODEL and not dxo.data.get(FLModelConst.OPTIMIZER_PARAMS):
            return cls._of_model(dxo.data)
        if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
            raise UpdateRefused(
                f"the data are of the kind {dxo.data_kind!r}; send WEIGHTS, WEIGHT_DIFF or an FL_MODEL without optimizer_params, "
                f"by itself or as the only member of a COLLECTION"
            )
        kind = DataKind(dxo.data_kind)
        meta = dxo.meta or {}
        return cls(dxo.data, kind is DataKind.WEIGHTS, meta, lambda values: DXO(kind, values, dict(_META)), form=kind.value)

    @classmethod
    def _of_model(cls, model: Mapping[str, Any]) -> SentWeights:
        kind = ParamsType(model.get(FLModelConst.PARAMS_TYPE) or ParamsType.FULL)

        def wrapped(values: dict[str, Any]) -> DXO:
            data = {FLModelConst.PARAMS_TYPE: kind, FLModelConst.PARAMS: values, FLModelConst.META: dict(_META)}
            return DXO(DataKind.FL_MODEL, data)

        values = model.get(FLModelConst.PARAMS) or {}
        form = f"{DataKind.FL_MODEL.value} of type {kind.value}"
        return cls(values, kind is ParamsType.FULL, model.get(FLModelConst.META) or {}, wrapped, form=form)


@dataclass(frozen=True)
class Instruction:
    """The model that came with a task.

    Args:
        task: identifier of the task. arrays: copies as numpy arrays. types: of the arrays or tensors as they came.
        parameters: names of the arrays that had finite floats in the first model of the job; they are released.
        members: names of the COLLECTIONs around the model; those around a result are sent as they are, so they must be the same.
    """

    task: Any
    arrays: Arrays
    types: Mapping[str, Any]
    parameters: frozenset[str]
    members: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, values: Mapping[str, Any], task: Any, parameters: frozenset[str] | None, untouched: Sequence[str] = UNTOUCHED
    ) -> Instruction:
        """Copy a model, since training may change its arrays in place.

        Args:
            parameters: as found in the first model of the job, or None for the first. untouched: last name parts of arrays that
                are no parameters, whatever their type.

        Raises:
            UpdateRefused: an array has no real numbers, or the parameters have diverged.
        """
        arrays = {name: _array(name, value) for name, value in values.items()}
        floats = {name for name, array in arrays.items() if array.dtype.kind == "f" and name.rpartition(".")[2] not in untouched}
        finite = frozenset(name for name in floats if np.isfinite(arrays[name]).all())
        if odd := sorted((parameters or finite) - finite)[:_SHOWN]:
            raise UpdateRefused(f"the model has no finite floating-point values in {odd}, and had them before: it has diverged")
        types = {name: getattr(value, "dtype", arrays[name].dtype) for name, value in values.items()}
        return cls(task, arrays, types, finite if parameters is None else parameters)

    def moved(self, weights: SentWeights) -> Arrays:
        """Return by how much training moved each parameter in a result, float32, in the order of the instruction.

        Raises:
            UpdateRefused: the result does not fit to the instruction, regardless of its values.
        """
        if weights.members != self.members:
            raise UpdateRefused(
                "the COLLECTION of the result has another name than that of the task: names are sent unprotected, so keep it"
            )
        if AlgorithmConstants.SCAFFOLD_CTRL_DIFF in weights.meta:
            raise UpdateRefused("SCAFFOLD sends a second vector, the change of its control term, which is not released")
        if processed := weights.meta.get(MetaKey.PROCESSED_ALGORITHM):
            raise UpdateRefused(f"the result is already processed by {processed!r}: put fedveil's filter before it")
        if unknown := [name for name in weights.values if name not in self.arrays][:_SHOWN]:
            raise UpdateRefused(f"the result has arrays that are not in the model of the task: {unknown}")
        names = [name for name in self.arrays if name in weights.values and name in self.parameters]
        if not names:
            raise UpdateRefused(f"the result has none of the model's parameters {sorted(self.parameters)[:_SHOWN]}")
        moved = {}
        for name in names:
            before, after = self.arrays[name], _array(name, weights.values[name])
            if after.dtype.kind != "f" or after.shape != before.shape:
                raise UpdateRefused(
                    f"{name!r} came as {before.dtype} of shape {before.shape}, but left as {after.dtype} of shape {after.shape}"
                )
            with np.errstate(all="ignore"):
                change = after.astype(np.float64) - (before.astype(np.float64) if weights.full else 0)
                moved[name] = np.asarray(change, np.float32)
        return moved

    def answered(self, names: Sequence[str], left: Arrays, *, full: bool) -> dict[str, Any]:
        """Return an answer with these names, in the types that came: released differences, and for other arrays no change.

        Args:
            full: whether the answer has weights, and not differences of weights.
        """
        answer = {}
        for name in names:
            array = self.arrays[name] if full else np.zeros_like(self.arrays[name])
            with np.errstate(all="ignore"):
                answer[name] = _typed(array + left[name].astype(np.float64) if name in left else array, self.types[name])
        return answer


def _array(name: str, value: Any) -> NDArray[Any]:
    """Return a copy of an array or tensor as a numpy array.

    Raises:
        UpdateRefused: it is neither, or does not hold real numbers.
    """
    if type(value).__module__.partition(".")[0] == "torch":
        import torch

        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor).numpy()
    if not isinstance(value, np.ndarray | np.generic | float) or np.asarray(value).dtype.kind not in "fiub":
        raise UpdateRefused(f"{name!r} must be an array or a tensor of real numbers, got {type(value).__name__}")
    return np.array(value, subok=False)


def _typed(array: NDArray[Any], kind: Any) -> Any:
    """Return an array in a type of numpy, or as a tensor in a type of torch."""
    if isinstance(kind, np.dtype):
        return np.asarray(array, kind)
    import torch

    return torch.from_numpy(np.array(array)).to(kind)
