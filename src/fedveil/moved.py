"""Old names of modules of fedveil 0.2, which work through 0.3: an import warns and returns the module under its new name."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import cast

MOVED = dict(
    line.split()
    for line in """
accounting.matrix_factorisation accounting.correlated_noise
accounting.random_tries accounting.selection
accounting.sampler_variation accounting.finite_precision
accounting.tree_aggregation accounting.correlated_noise
accounting.truncated papers.aldp_fl.claim
adversary attacks
adversary.attack_kinds attacks.attack_run
attacks.intercept attacks.interception
audit.float_pattern audit.low_bits
audit.integer_bits audit.low_bits
configuration experiment
ledger.budget_spending ledger.population_budget
methods.adap_dp_fl papers.ladp_fl.baselines
methods.adapldp papers.ladp_fl.adapldp
methods.adaptive methods.shared
methods.blur_lus papers.fedglp_adp.sparse_baselines
methods.censor papers.fedanc.baselines
methods.dpa_ldp papers.ladp_fl.noise_schedules
methods.fed_addp papers.fedglp_adp.fisher_baselines
methods.fed_dpa papers.fedglp_adp.fisher_baselines
methods.fed_smp papers.fedglp_adp.sparse_baselines
methods.gfl_aldpa papers.aldp_fl.baselines
methods.ldp_fed papers.aldp_fl.baselines
methods.nbafl papers.ladp_fl.baselines
methods.sensitive_dp papers.ladp_fl.baselines
methods.soteria papers.fedanc.baselines
methods.time_varying_dp papers.ladp_fl.noise_schedules
network deploy
pages report
pages.compare_files report.compare_page
pages.explorer_methods report.explorer
pages.figures report.figures
pages.figures.partition_figure report.figures
papers.convergent_dp.convergent_claim papers.convergent_dp.claim
papers.fedglp_adp.fedglp_claim papers.fedglp_adp.claim
papers.ladp_fl.ladp_claim papers.ladp_fl.claim
release.banded mechanism.mechanisms
release.cost mechanism.cost
release.gradient_blocks gradients.gradient_blocks
release.grid mechanism.grid
release.noise_mechanism mechanism.mechanisms
release.plan mechanism.plan
release.sampler mechanism.sampler
run experiment
statement.certify experiment.certify
studies.compare.comparison_spec studies.compare.comparison_plan
tasks.column tasks.task
""".strip().splitlines()
)
"""Old and new names, without `fedveil.`; modules of a package that moved are in the new package, unless they are listed."""


def place(old: str) -> str:
    """Return the new full name of a module of 0.2, or "" if it did not move."""
    parts = old.split(".")[1:]
    heads = (end for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in MOVED)
    return next((".".join(("fedveil", MOVED[".".join(parts[:end])], *parts[end:])) for end in heads), "")


class Moved(MetaPathFinder, InspectLoader):
    """Importer of modules of 0.2. It comes first, since the path of a moved package has its modules under their new names."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        new = place(fullname) if fullname.startswith("fedveil.") else ""
        if not new or importlib.util.find_spec(new) is None:
            return None
        warnings.warn(f"{fullname} is {new} now; the old name works through 0.3", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, self, origin=new)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = cast(ModuleSpec, module.__spec__).loader_state
        vars(module).setdefault("__path__", [])  # a package of 0.2 that is now one module

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code for `python -m`."""
        spec = cast(ModuleSpec, importlib.util.find_spec(place(fullname)))
        return cast(InspectLoader, spec.loader).get_code(spec.name)

    def get_source(self, fullname: str) -> str | None:
        return None
