"""What an attack declares, what a user asks of it, and what it answers."""

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
"""What an attacker may know besides; the first four are public in every run."""
PUBLIC = ("mask", "noise", "clip", "aux")

Examples = Literal["drawn", "all", "test"]
Place = Literal["first", "last", "watched"]
OnProgress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is going on)."""


def setting(default: Any, *, least: float | None = None, above: float | None = None, choices: tuple[Any, ...] = ()) -> Any:
    """A setting of an attack: its default, the smallest value of a number, what a number must exceed, or the possible values."""
    return field(default=default, metadata={"least": least, "above": above, "choices": choices})


@dataclass(frozen=True)
class Attack:
    """An attack: its fields are its settings, and the rest of what is known about it stands beside them.

    takes: options besides seed, round and images. place: where it begins unless a round is given: the `first` round, the `last`
    model, or the first with all rounds `watched` by the attack itself. examples: what `attack.examples` may be besides `drawn`.
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
        import torch

        return torch.Generator().manual_seed(self.seed + more)


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
