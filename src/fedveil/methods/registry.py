"""The methods by name. Adding one is one file and one line here."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from fedveil.errors import ConfigError, explain, nearest
from fedveil.methods.aldp_fl import ALDPFL
from fedveil.methods.base import Method, MethodConfig
from fedveil.methods.dp_fedavg import DPFedAvg
from fedveil.methods.fedanc import FedANC
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedglp_adp import FedGLPADP
from fedveil.methods.ladp_fl import LaDPFL
from fedveil.methods.noisy_fedavg import NoisyFedAvg
from fedveil.methods.noisy_fedprox import NoisyFedProx

METHODS: dict[str, type[MethodConfig]] = {
    "fedavg": FedAvg,
    "dp-fedavg": DPFedAvg,
    "fedglp-adp": FedGLPADP,
    "fedanc": FedANC,
    "ladp-fl": LaDPFL,
    "noisy-fedavg": NoisyFedAvg,
    "noisy-fedprox": NoisyFedProx,
    "aldp-fl": ALDPFL,
}


def method_from(options: dict[str, Any]) -> Method:
    """The method that `options` describe: `name`, and the parameters of that method.

    Raises:
        ConfigError: unknown name or parameter, impossible value.
    """
    name = options.get("name")
    if name not in METHODS:
        raise ConfigError(f"method.name = {name!r}: unknown method{nearest(str(name), METHODS)}; there are {', '.join(METHODS)}")
    try:
        method: Method = METHODS[name](**options)  # type: ignore[assignment]
    except ValidationError as error:
        raise ConfigError(explain(error, METHODS[name], "method.")) from None
    return method
