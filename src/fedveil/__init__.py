"""fedveil: differentially private federated learning whose privacy you can check.

The names below load what they need when first used, so that `import fedveil` is quick. What trains needs the extra `train`;
statements, ledgers, budgets, verification and releases for other platforms do not.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from fedveil.moved import Moved

__version__ = "0.3.0.dev0"

_WHERE = {
    "load": "fedveil.data.load",
    "partition": "fedveil.data.partition",
    "Dataset": "fedveil.data.dataset",
    "from_arrays": "fedveil.data.own.arrays",
    "from_frame": "fedveil.data.own.frames",
    "from_torch": "fedveil.data.own.torch_data",
    "from_huggingface": "fedveil.data.own.torch_data",
    "configure": "fedveil.experiment.config",
    "load_config": "fedveil.experiment.config_files",
    "replace": "fedveil.experiment.config",
    "register_model": "fedveil.models.model_registry",
    "embed": "fedveil.models.embed",
    "fix": "fedveil.models.trainable",
    "save_adapter": "fedveil.models.lora",
    "certify": "fedveil.experiment.certify:certify_config",
    "to_markdown": "fedveil.statement.statement_layout",
    "train": "fedveil.experiment.run:run",
    "Task": "fedveil.tasks.task",
    "Classification": "fedveil.tasks.classification",
    "Binary": "fedveil.tasks.classification",
    "MultiLabel": "fedveil.tasks.classification",
    "Regression": "fedveil.tasks.regression",
    "Segmentation": "fedveil.tasks.segmentation",
    "TokenPrediction": "fedveil.tasks.token_prediction",
    "Survival": "fedveil.tasks.survival",
    "Column": "fedveil.tasks.task",
    "register": "fedveil.experiment.plugins",
    "register_task": "fedveil.tasks.task_registry",
    "publish": "fedveil.experiment.published_copy",
    "verification": "fedveil.experiment.verification",
    "Releaser": "fedveil.platforms.releaser",
    "NoisyMean": "fedveil.platforms.releaser",
    "UpdateRefused": "fedveil.errors",
    "dp_mod": "fedveil.deploy.dp_mod",
    "CentralDP": "fedveil.deploy.central_dp",
    "Federation": "fedveil.api.federation",
    "Run": "fedveil.api.run",
    "open_run": "fedveil.api.run",
    "compare": "fedveil.api.federation",
    "Statement": "fedveil.statement.statement_layout:PrintedStatement",
    "Training": "fedveil.experiment.sections",
    "Privacy": "fedveil.experiment.sections",
    "Optimizer": "fedveil.experiment.sections:LocalOptimizer",
    "ServerOptimizer": "fedveil.experiment.sections",
    "ConfigError": "fedveil.errors",
    "DataError": "fedveil.errors",
    "FedveilError": "fedveil.errors",
    "BudgetExhausted": "fedveil.errors",
    "LedgerError": "fedveil.errors",
}

sys.meta_path.insert(0, Moved())


def _places() -> dict[str, str]:
    """Where each name is; the classes of the methods are where their tables say."""
    table = importlib.import_module("fedveil.methods.method_table").METHOD_TABLE
    table = table | importlib.import_module("fedveil.registry").built_in("method")
    return _WHERE | {place.partition(":")[2]: place for place in table.values()}


def __dir__() -> list[str]:
    return sorted(["__version__", *_places()])


def __getattr__(name: str) -> Any:
    places = _WHERE if name in _WHERE else _places()
    if name == "__all__":
        return __dir__()
    if name not in places:
        raise AttributeError(f"module 'fedveil' has no attribute {name!r}; it has {', '.join(places)}")
    module, _, attribute = places[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute or name)
    except ModuleNotFoundError as error:
        if not (lacking := importlib.import_module("fedveil.errors").missing_extra(error)):
            raise
        raise ModuleNotFoundError(lacking, name=error.name) from error
