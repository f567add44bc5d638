"""Names that the shell completes: each list is read, without torch, when the user asks for it."""

from __future__ import annotations

from collections.abc import Iterable


def method_names(incomplete: str) -> list[str]:
    """Names of methods."""
    from fedveil.methods.method_registry import METHODS

    return _beginning(incomplete, METHODS)


def preset_names(incomplete: str) -> list[str]:
    """Names of presets."""
    from fedveil.configuration.presets import names

    return _beginning(incomplete, names())


def data_set_names(incomplete: str) -> list[str]:
    """Names of data sets."""
    from fedveil.data.catalogue import CATALOGUE

    return _beginning(incomplete, CATALOGUE)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
