"""The features that a configuration asks for: built in, or a function of one's own by import path."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fedveil.configuration.plugins import load_plugins, module_of
from fedveil.data.features.feature_map import FEATURES, FeatureMap
from fedveil.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fedveil.configuration.sections import DataSection, PublicSection


def feature_map(data: DataSection, public: PublicSection) -> FeatureMap | None:
    """What makes the features, or None where examples are learned from as they are; a function of one's own is imported.

    Raises:
        ConfigError: unknown name, or an import path at which there is no function.
    """
    if data.features is None:
        if public.data:
            raise ConfigError("public.data whitens features, and there are none: set data.features, such as 'oriented-gradients'")
        return None
    make = _own(data.features, data.code) if data.code else FEATURES.get(data.features)
    if make is None:
        raise ConfigError(
            f"data.features = {data.features!r}: unknown features{nearest(data.features, FEATURES)}; there are "
            f"{', '.join(FEATURES)}; a function of your own needs an import path such as 'features.py:edges'"
        )
    return FeatureMap(data.features, make, public.data, public.components, data.data_dir, data.download)


def _own(path: str, code: tuple[str, ...]) -> Any:
    load_plugins(code, key="data.features")
    module, attribute = sys.modules[module_of(code[0])], path.rpartition(":")[2]
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"data.features = {path!r}: {code[0]} has no function {attribute!r}{nearest(attribute, vars(module))}")
    return found
