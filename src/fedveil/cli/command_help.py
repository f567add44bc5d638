"""The groups of commands in `--help`, and the answer to an option that does not exist."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from fedveil.errors import one_line

PANELS = {
    "Start": ("demo", "new", "doctor", "data", "methods", "models", "tasks", "explain"),
    "Train": ("plan", "certify", "run", "tune", "predict", "export"),
    "Check": ("verify", "ledger", "audit", "attack", "replay", "twin"),
    "Compare": ("compare", "reproduce", "plot", "explore"),
    "Share": ("report", "publish", "sign"),
    "Deploy": ("net", "serve", "join", "budget"),
}
"""The commands of each group, in the order in which `--help` lists them; all others are listed last."""
OTHERS = "Others"
KEYS = {
    "data": "name source data_dir download client_test_fraction public_fraction user_test_fraction features handed_over",
    "data.partition": "kind clients",
    "public": "data components",
    "model": "name",
    "task": "name",
    "method": "name weighting proximal clip",
    "training": "rounds clients_per_round sampling local_epochs local_steps batch_size batch_clip schedule local "
    "example_clip per_example evaluate_every max_update_norm client_timeout measure_trained "
    "personal_on_test_set",
    "training.optimizer": "name lr momentum weight_decay",
    "training.server_optimizer": "name lr momentum weight_decay betas eps relative_to_clip",
    "privacy": "epsilon noise_multiplier delta unit adjacency view allow_vacuous_delta min_survivors colluders "
    "noise_place spare_attempts max_participations budget selection grid_bits evaluation noise_cohort",
    "run": "seed seeded_noise engine clients_at_once precision final_model deterministic isolation "
    "secure_aggregation name plugins track",
}
"""The keys of a configuration by section, written down so that an unknown option is answered at once (a test compares)."""
_ORDER = [name for group in PANELS.values() for name in group]


def in_order(names: list[str]) -> list[str]:
    """Return the names of commands in the order of the groups."""
    return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))


def panel_of(name: str) -> str:
    """Return the group of a command."""
    return next((panel for panel, group in PANELS.items() if name in group), OTHERS)


class Command(TyperCommand):
    """Command that answers an unknown option with the key of the configuration that has this name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", "")
            if option and any("--set" in parameter.opts for parameter in self.params) and (keys := _keys_named(option)):
                error.possibilities = None  # type: ignore[attr-defined]
                error.message = one_line(  # type: ignore[attr-defined]
                    f"No such option: {option}. It is a key of the configuration: "
                    + " or ".join(f"--set {k}=VALUE" for k in keys)
                )
            raise


def _keys_named(option: str) -> list[str]:
    """Return the keys of a configuration whose last part, or whole name, is that of an option."""
    name = option.lstrip("-").replace("-", "_")
    keys = [f"{section}.{key}" for section, listed in KEYS.items() for key in listed.split()]
    return [key for key in keys if name in (key, key.rpartition(".")[2])]
