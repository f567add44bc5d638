"""The reconstruction attacks by name, what a user asks of an attack, and what an attack answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from fedveil.attacks.reconstruction import Attack
from fedveil.errors import ConfigError, unknown
from fedveil.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


LEAST: Mapping[str, float] = {
    **dict.fromkeys(
        ("steps", "restarts", "seeds", "targets", "probes", "latent", "fakes", "auxiliary", "epochs", "patience", "judge_epochs"),
        1,
    ),
    **dict.fromkeys(("tolerance", "warmup", "langevin", "matching", "tv", "l2", "bn", "group"), 0),
    **dict.fromkeys(("private", "attacker", "warm"), 0),
}
"""The smallest value of a number; one that is not listed has none."""
ABOVE: Mapping[str, float] = {"lr": 0}
"""What a number must exceed."""
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "line_search": ("strong_wolfe", None),
    "rule": ("gradient", "inversion"),
    "mode": ("passive", "active"),
}


def checked(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """All settings, the user's before defaults, in the defaults' types; a default of None stands for a whole number.

    Raises:
        ConfigError: a value of another type, or out of range.
    """
    return {**defaults, **{name: _one(name, value, defaults[name]) for name, value in settings.items()}}


def _one(name: str, value: Any, default: Any) -> Any:
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise _wrong(name, value, " or ".join(str(choice) for choice in CHOICES[name] if choice is not None))
        return value
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value
    if isinstance(default, tuple):
        if not isinstance(value, list | tuple) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise _wrong(name, value, "a list of whole numbers")
        return tuple(value)
    return value if value is None and default is None else _number(name, value, isinstance(default, float))


def _number(name: str, value: Any, real: bool) -> float:
    least, above = LEAST.get(name, -math.inf), ABOVE.get(name, -math.inf)
    kind = float | int if real else int
    if isinstance(value, bool) or not isinstance(value, kind) or not (math.isfinite(value) and value >= least and value > above):
        wanted = "a number" if real else "a whole number"
        reach = f" of at least {least:g}" if name in LEAST else f" above {above:g}" if name in ABOVE else ""
        raise _wrong(name, value, wanted + reach)
    return float(value) if real else int(value)


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"attack.{name} = {value} is not possible: give {wanted}")


ATTACKS: Registry[type[Attack]] = Registry(
    "attack",
    "attack",
    {
        "dlg": "fedveil.attacks.reconstruction:DLG",
        "idlg": "fedveil.attacks.reconstruction:IDLG",
        "ig": "fedveil.attacks.reconstruction:IG",
        "gradinversion": "fedveil.attacks.reconstruction:GradInversion",
        "subspace": "fedveil.attacks.reconstruction:Subspace",
    },
)


def attack(kind: str, **settings: Any) -> Attack:
    """The attack `kind` with its settings; raises ConfigError for an unknown kind or setting, or an impossible value."""
    chosen = ATTACKS.find(kind)
    known = {field.name: field.default for field in fields(chosen)}
    wrong = sorted(set(settings) - set(known))
    if wrong:
        raise ConfigError(f"attack {kind} has no setting {', '.join(wrong)}; it takes {', '.join(known)}")
    return chosen(**checked(settings, known))


KNOWS = {
    "mask": "which coordinates were sent",
    "noise": "the noise std of each layer",
    "clip": "the bounds on the update",
    "aux": "500 public examples of the same distribution",
    "labels": "the labels",
    "others": "what every other participant contributed",
}
"""What an attacker may know besides; the first four are public in every run."""
PUBLIC = ("mask", "noise", "clip", "aux")

Examples = Literal["drawn", "all", "test"]
OnProgress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is going on)."""


@dataclass(frozen=True)
class AttackOptions:
    """How to attack; None stands for the default of the kind.

    Args:
        images: examples attacked. batch: examples behind each attacked upload. restarts, steps: of the attack, per upload.
        seed: of the attack, of the choice of examples and of the noise of the door. round: whose model is attacked, from 0.
        knows: names of `KNOWS`. defence: the run's own method, or none at all for comparison.
        settings: further settings of the kind.
        examples: `drawn` from the clients' by the seed; `all` that each client has; or public `test` images: each in as many
            copies as a client has examples, so that noise which depends on their number is the run's, in one step on one copy.
    """

    images: int | None = None
    batch: int | None = None
    restarts: int | None = None
    steps: int | None = None
    seed: int = 0
    round: int | None = None
    knows: tuple[str, ...] = PUBLIC
    defence: Literal["run", "none"] = "run"
    settings: Mapping[str, Any] = field(default_factory=dict)
    examples: Examples = "drawn"

    def __post_init__(self) -> None:
        for name in self.knows:
            if name not in KNOWS:
                raise unknown("--knows", name, "knowledge", (*KNOWS, "none"))
        if self.defence not in ("run", "none"):
            raise ConfigError(f"--defence {self.defence}: give run (the configured method) or none (raw updates, for comparison)")
        if self.examples not in get_args(Examples):
            raise ConfigError(f"attack.examples = {self.examples!r}: give {', '.join(get_args(Examples))}")
        if self.examples != "drawn" and self.batch is not None:
            raise ConfigError(f"--batch {self.batch}: attack.examples = {self.examples!r} fixes the batch; leave --batch out")
        for name, least in (("images", 1), ("batch", 1), ("restarts", 1), ("steps", 1), ("round", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name} {value}: give at least {least}")
        if not 0 <= self.seed < 2**62:
            raise ConfigError(f"--seed {self.seed}: give an integer from 0 to 2^62 - 1")

    def generator(self, more: int = 0) -> torch.Generator:
        """Random numbers of the attack's own; `more` tells streams apart."""
        return torch.Generator().manual_seed(self.seed + more)

    def settings_of(self, kind: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The kind's settings with the user's in them; raises ConfigError for one that it does not have, or an impossible one."""
        wrong = sorted(set(self.settings) - set(defaults))
        if wrong:
            there = f"it takes {', '.join(defaults)}" if defaults else "it takes none"
            raise ConfigError(f"--set attack.{wrong[0]}: attack {kind} has no such setting; {there}")
        return checked(self.settings, defaults)


@dataclass(frozen=True)
class AttackOutcome:
    """What an attack found.

    Args:
        figures: the headline, name to value with its unit, for people. record: everything, ready for JSON.
        assumptions: what the attacker knew and how to read the result, as sentences.
        originals, rows: what to draw: images [n, 1 or 3, height, width] in [0, 1], and reconstructions of them by name.
        paired: whether each image of a row stands for the original above it, and so has a PSNR.
    """

    figures: Mapping[str, str]
    record: Mapping[str, Any]
    assumptions: Sequence[str]
    originals: Tensor | None = None
    rows: Sequence[tuple[str, Tensor]] = ()
    paired: bool = True


def known_as(text: str) -> tuple[str, ...]:
    """Names of `KNOWS` from a list with commas; "none" for an attacker who knows none of them."""
    return () if text.strip() in ("", "none") else tuple(name.strip() for name in text.split(","))
