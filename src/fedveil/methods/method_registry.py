"""The methods by name. Adding one is one file and one line here; a project's own are registered by its plugins."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from pydantic import ValidationError

from fedveil.errors import ConfigError, explain, nearest
from fedveil.methods.adaptive_clipping import AdaptiveClipping
from fedveil.methods.aldp_fl import ALDPFL
from fedveil.methods.banded_mf import BandedMF
from fedveil.methods.base import Method, MethodConfig
from fedveil.methods.dp_fedavg import DPFedAvg
from fedveil.methods.dp_scaffold import DPScaffold
from fedveil.methods.fedanc import FedANC
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedglp_adp import FedGLPADP
from fedveil.methods.ladp_fl import LaDPFL
from fedveil.methods.noisy_fedavg import NoisyFedAvg
from fedveil.methods.noisy_fedprox import NoisyFedProx

Kind = TypeVar("Kind", bound=MethodConfig)

METHODS: dict[str, type[MethodConfig]] = {
    "fedavg": FedAvg,
    "dp-fedavg": DPFedAvg,
    "adaptive-clipping": AdaptiveClipping,
    "dp-scaffold": DPScaffold,
    "banded-mf": BandedMF,
    "fedglp-adp": FedGLPADP,
    "fedanc": FedANC,
    "ladp-fl": LaDPFL,
    "noisy-fedavg": NoisyFedAvg,
    "noisy-fedprox": NoisyFedProx,
    "aldp-fl": ALDPFL,
}


def register(kind: type[Kind]) -> type[Kind]:
    """Make a method of one's own known by its name: a decorator of its configuration class.

    Raises:
        ConfigError: a part of `Method` is missing, or another method has the name.
    """
    parts = [part for part in vars(Method) if not part.startswith("_")]
    missing = [part for part in parts if not hasattr(kind, part) and part not in kind.model_fields]
    if getattr(kind, "policy", None) is MethodConfig.policy:
        missing.append("policy")
    name = kind.model_fields["name"].default if "name" in kind.model_fields else None
    if missing or not isinstance(name, str):
        lacks = ", ".join(missing) or 'name: Literal["..."] = "..."'
        raise ConfigError(f"{kind.__qualname__} is not a method yet: it lacks {lacks} (see fedveil.methods.base.Method)")
    if name in METHODS and METHODS[name].__module__ != kind.__module__:
        raise ConfigError(f"the name {name!r} of {kind.__qualname__} belongs to {METHODS[name].__qualname__}: choose another")
    METHODS[name] = kind
    return kind


def method_from(options: dict[str, Any]) -> Method:
    """The method that `options` describe: `name`, and the parameters of that method.

    Raises:
        ConfigError: unknown name or parameter, impossible value.
    """
    name = options.get("name")
    kind = _kind(str(name))
    try:
        method: Method = kind(**options)
    except ValidationError as error:
        raise ConfigError(explain(error, kind, "method.")) from None
    return method


def described(name: str) -> str:
    """A method's one line, its parameters with their defaults, and what they mean."""
    kind = _kind(name)
    defaults = "\n".join(f"  {key} = {field.default!r}" for key, field in kind.model_fields.items() if key != "name")
    return f"{name}: {inspect.getdoc(kind)}\n\nDefaults:\n{defaults}"


def _kind(name: str) -> type[MethodConfig]:
    if name not in METHODS:
        own = "a method of your own needs its file in run.plugins"
        raise ConfigError(
            f"method.name = {name!r}: unknown method{nearest(name, METHODS)}; there are {', '.join(METHODS)}; {own}"
        )
    return METHODS[name]
