"""The base class of attacks, the options of a user, and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from fedveil.errors import ConfigError, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedveil.attacks.snapshot import Snapshot

KNOWS = {
    "mask": "which coordinates were sent",
    "noise": "the noise std of each layer",
    "clip": "the bounds on the update",
    "aux": "500 public examples of the same distribution",
    "labels": "the labels",
    "others": "what every other participant contributed",
}
"""Extra knowledge of an attacker; the first four entries are public in every run."""
PUBLIC = ("mask", "noise", "clip", "aux")

Examples = Literal["drawn", "all", "test"]
Place = Literal["first", "last", "watched"]
OnProgress = Callable[[int, int, str], None]
"""A callback for progress: (steps done, total steps, description of the current step)."""


def setting(default: Any, *, least: float | None = None, above: float | None = None, choices: tuple[Any, ...] = ()) -> Any:
    """Declare a setting of an attack: default, smallest value (`least`), exclusive lower limit (`above`), or possible values."""
    return field(default=default, metadata={"least": least, "above": above, "choices": choices})


@dataclass(frozen=True)
class Attack:
    """The base class of attacks. The fields of a subclass are its settings; its class variables describe it.

    takes: the options it accepts in addition to seed, round and images. place: where it starts unless the user gives a round:
    the `first` round, the `last` model, or the first round with the attack itself following all rounds (`watched`).
    examples: the values of `attack.examples` that it accepts in addition to `drawn`.
    """

    name: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = ()
    place: ClassVar[Place] = "first"
    examples: ClassVar[tuple[Examples, ...]] = ()

    @classmethod
    def settings(cls, options: AttackOptions) -> dict[str, Any]:
        """Return the settings that a user's options give."""
        return dict(options.settings)

    def on(self, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
        """Attack the releases of a snapshot."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttackOptions:
    """The options of an attack; None stands for the attack's default.

    Args:
        images: number of attacked examples. batch: number of examples in each attacked upload. restarts, steps: per upload.
        seed: seed of the attack, of the choice of examples and of the door's noise. round: the attacked round, counted from 0.
        knows: names of `KNOWS`. defence: `run`, the method of the run, or `none`, no defence, for comparison.
        settings: further settings of the attack.
        examples: `drawn`, clients' examples chosen by the seed; `all`, everything that each client holds; or `test`, public test
            images. A client then holds one test image in as many copies as it has examples, so that noise which depends on this
            number is that of the run, and takes one step on one copy.
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
        """Return a random generator of the attack; each value of `more` gives a separate stream."""
        import torch

        return torch.Generator().manual_seed(self.seed + more)


@dataclass(frozen=True)
class AttackOutcome:
    """The result of an attack.

    Args:
        figures: the main results as text, by name. record: all results, ready for JSON.
        assumptions: sentences about the attacker's knowledge and the reading of the result.
        originals, rows: the picture: images [n, 1 or 3, height, width] in [0, 1], and reconstructions of them by name.
        paired: whether each image of a row reconstructs the original above it; only then does it have a PSNR.
    """

    figures: Mapping[str, str]
    record: Mapping[str, Any]
    assumptions: Sequence[str]
    originals: Tensor | None = None
    rows: Sequence[tuple[str, Tensor]] = ()
    paired: bool = True


def known_as(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of names of `KNOWS`; "none" gives an empty tuple."""
    return () if text.strip() in ("", "none") else tuple(name.strip() for name in text.split(","))
