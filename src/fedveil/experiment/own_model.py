"""Construction of the module to train from the section `model`, and the facts that a run records about it."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError, nearest, unknown
from fedveil.experiment.model_section import HANDED_OVER, Network
from fedveil.experiment.plugins import importable, load_plugins, module_of
from fedveil.models import model_registry as models
from fedveil.models.model_registry import OWN_MODELS, UserModel, made
from fedveil.models.parts import trained_shapes
from fedveil.training.cores import process_state
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import nn

    from fedveil.models.parts import RecordedModel

_log = logging.getLogger(__name__)


def layout_of_network(network: Network, input_shape: tuple[int, ...], outputs: int) -> Layout:
    """Return the layout of the trained part: as recorded, from a built-in network's shapes, or else by building the model.

    Raises:
        ConfigError: as `built`.
    """
    if network.recorded is None and not network.needs_building:
        return Layout.of(
            trained_shapes(models.shapes(network.name, input_shape, outputs, **dict(network.options)), network.parts)
        )
    return Layout.of((network.recorded or as_recorded(network, input_shape, outputs, 0)).shapes)


def as_recorded(network: Network, input_shape: tuple[int, ...], outputs: int, seed: int) -> RecordedModel:
    """Build the model, and return the facts that a run records about it.

    Raises:
        ConfigError: as `built`.
    """
    from fedveil.models.trainable import recorded_model

    return recorded_model(built(replace(network, recorded=None), input_shape, outputs, seed), network.parts)


@process_state()
def built(network: Network, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """Return the module in training mode, with gradients only for the trained part, checked against its recorded sizes and flags.

    Args:
        input_shape: of one example. outputs: numbers that the task needs for each example. seed: of the initial model.

    Raises:
        ConfigError: the module cannot be obtained or trained here, or differs from the recorded one.
    """
    from torch.nn import Module

    from fedveil.models.trainable import check_recorded, choose_parts, recorded_model

    module = _module(network, input_shape, outputs, seed)
    if network.plain and network.recorded is None:
        return module
    choose_parts(module, network.parts, seed)
    if network.recorded is not None:
        by_seed = not isinstance(network.source, Module)
        check_recorded(network.recorded, recorded_model(module, network.parts), by_seed=by_seed)
    return module


def _module(network: Network, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    if network.built_in:
        return models.build(network.name, input_shape, outputs, seed, **dict(network.options))
    from torch.nn import Module

    from fedveil.models.trainable import own_copy

    if isinstance(network.source, Module):
        return own_copy(network.source)
    return made(_own(network), dict(network.options), input_shape, outputs, seed)


def _own(network: Network) -> UserModel:
    """Return the constructor of this model; importing its code runs it."""
    name = network.name
    if network.source is not None:
        return UserModel(network.source)
    if name == HANDED_OVER:
        kind = "" if network.recorded is None else f" ({network.recorded.kind})"
        raise ConfigError(
            f"model.name = {name!r}: a program handed the model{kind} over, and the configuration does not make it: hand it over "
            f"again in Python, as in fv.load_config('RUN/config.toml', model=...)"
        )
    if network.code:
        return UserModel(_imported(network))
    require_known(network)
    return OWN_MODELS[name]


def require_known(network: Network) -> None:
    """Refuse a name that is neither built in, registered nor an import path.

    Raises:
        ConfigError: unknown name; the message suggests the most similar known one.
    """
    name, known_names = network.name, [*models.MODELS, *OWN_MODELS]
    if name not in known_names and name != HANDED_OVER and not network.code:
        hint = "a model of your own needs its file in run.plugins, or an import path such as 'mypkg.nets:Net' or 'nets.py:Net'"
        raise unknown("model.name", name, "model", known_names, hint)


def _imported(network: Network) -> Any:
    (code,), attribute = network.code, network.name.rpartition(":")[2]
    if network.admit is not None:
        network.admit()
    present = importable(code)
    if present and module_of(present) not in sys.modules:
        _log.warning("model.name = %r: %s is imported, which runs its code", network.name, present)
    load_plugins(network.code, key="model.name")
    target: Any = sys.modules[module_of(code)]
    for part in attribute.split("."):
        if not part or not hasattr(target, part):
            raise ConfigError(f"model.name = {network.name!r}: {code} has no {attribute!r}{nearest(attribute, vars(target))}")
        target = getattr(target, part)
    if not callable(target) or isinstance(target, type(sys)):
        raise ConfigError(f"model.name = {network.name!r}: {attribute} is no class and no function that makes an nn.Module")
    return target
