"""The configuration with another method or another partition, as `--methods` and `--partition` name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.configuration.config import Config, override, parse
from fedveil.data.partition import checked_options
from fedveil.data.partition_options import PARTITIONS
from fedveil.errors import ConfigError
from fedveil.methods.method_registry import METHODS
from fedveil.studies.compare.comparison_spec import By

PROMISE = ("privacy.view", "privacy.unit", "privacy.adjacency", "privacy.delta")
"""What an epsilon speaks of; proven ones are equal only where these are."""


def configured(config: Config, method: str, by: By = "proven") -> Config:
    """The configuration with another method: `name:key=value:...`; the configuration's own method keeps its options.

    Raises:
        ConfigError: an unknown method, or an option that cannot be.
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
        if by == "proven" and key in PROMISE:
            raise ConfigError(
                f"--methods {method}: {key} is part of the guarantee, which is the same for all methods: "
                f"set it in the configuration (--set {option}); with --by claimed the methods may differ in it"
            )
        override(raw, f"{key if '.' in key else f'method.{key}'}={value}")
    return parse(raw)


def with_partitions(config: Config, partitions: Sequence[str]) -> list[tuple[str, Config]]:
    """The configuration with each partition, under its name; as it is where none is named."""
    if not partitions:
        return [("", config)]
    return [
        (text, config.model_copy(update={"data": config.data.model_copy(update={"partition": partition_of(text, config)})}))
        for text in partitions
    ]


def partition_of(text: str, config: Config) -> dict[str, Any]:
    """The partition that `kind:value` or `kind:key=value:...` describes, among the configuration's clients by default.

    Raises:
        ConfigError: an unknown kind or key, an impossible value.
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
    """The option that a bare value stands for: the first that the kind has of its own."""
    fields = PARTITIONS[kind].model_fields if kind in PARTITIONS else {}
    own = [key for key in fields if key not in ("kind", "clients")]
    return own[0] if own else "clients"
