"""Record and replay: a federation on its data, then on neighbouring data, with what the first run released replayed.

Whatever must not depend on private data is then the same in both, and each contribution lies within the sensitivity that was
declared for it. One run on one neighbour proves nothing, but a leak by another way than the released numbers shows at once, and
with certainty, since all randomness is the same.

Source: the idea of an adversarial record and replay of a differentially private program is dp-recorder's (PETS 2026).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.accounting.types import Adjacency, Unbounded
from fedveil.adversary.neighbours import Neighbour, changes_for, neighbours
from fedveil.adversary.replay_door import NOISE, PLANS, POST_PROCESSED, SENSITIVITY, UPLOADS, WEIGHTS
from fedveil.adversary.replay_notes import Note, difference
from fedveil.adversary.replay_records import ROWS
from fedveil.adversary.replay_world import BROADCAST, END, HISTORY, MODELS, ORDER, PARTICIPANTS, SCORE, STATES, Fresh, World, play
from fedveil.errors import ConfigError
from fedveil.methods.run_cost import releases_to
from fedveil.run.assembly import federation
from fedveil.run.data_card import NOTHING, HandedOver
from fedveil.run.resolve import opened
from fedveil.training.cores import process_state

if TYPE_CHECKING:
    from fedveil.adversary.neighbours import Change
    from fedveil.configuration.config import Config
    from fedveil.federation.progress import Federation

OTHERS = "contributions of all other clients"

COMPARED = (
    PARTICIPANTS,
    BROADCAST,
    PLANS,
    ROWS,
    UPLOADS,
    WEIGHTS,
    POST_PROCESSED,
    NOISE,
    STATES,
    MODELS,
    HISTORY,
    SCORE,
    ORDER,
    END,
    OTHERS,
)
"""Checks that compare the two worlds."""

OnWorld = Callable[[int, int, str], None]
"""Called before each world with its number from 0, the number of worlds, and its name."""


@dataclass(frozen=True)
class WorldComparison:
    """One check over all worlds.

    Args:
        compared: how many values. finding: the first that is wrong, with its world; empty where all is well.
    """

    check: str
    compared: int
    finding: str = ""

    @property
    def holds(self) -> str:
        """In a word, that all is well."""
        return "identical" if self.check in COMPARED else "holds"


@dataclass(frozen=True)
class Replayed:
    """What a replay found. rounds: how many were played. worlds: the neighbours."""

    method: str
    scope: str
    rounds: int
    worlds: tuple[str, ...]
    checks: tuple[WorldComparison, ...]

    @property
    def findings(self) -> dict[str, str]:
        """By check; empty where nothing was found."""
        return {check.check: check.finding for check in self.checks if check.finding}

    def to_dict(self) -> dict[str, Any]:
        checks = [{**vars(check), "passed": not check.finding} for check in self.checks]
        return {**vars(self), "worlds": list(self.worlds), "checks": checks, "passed": not self.findings}


@process_state()
def replay(
    config: Config,
    *,
    rounds: int = 3,
    engine: str = "inline",
    on_world: OnWorld | None = None,
    handed_over: HandedOver = NOTHING,
) -> Replayed:
    """Replay the first rounds of a configuration on all neighbours that its unit has; nothing is charged to any ledger of a run.

    Args:
        rounds: at most these. engine: `inline`, or `pool`, which cannot see the order of releases.
        on_world: told of progress. handed_over: data and partition in the place of the configured ones.

    Raises:
        ConfigError: a configuration that promises nothing, or whose first release is refused.
    """
    experiment, prepared = opened(config, handed_over.data, handed_over.partition)
    experiment = dataclasses.replace(experiment, seeded_noise=True)

    def fresh(folder: Path) -> Federation:
        return federation(experiment, prepared, folder / "no-ledger", "replay")

    return replay_federation(fresh, rounds=rounds, engine=engine, on_world=on_world)


@process_state()
def replay_federation(
    fresh: Fresh,
    *,
    rounds: int = 3,
    engine: str = "inline",
    changes: Sequence[Change] | None = None,
    on_world: OnWorld | None = None,
) -> Replayed:
    """As `replay`, for federations that a program makes.

    Args:
        fresh: see `Fresh`. changes: some of `neighbours.CHANGES`; by default all that the unit has.
    """

    def made(folder: Path) -> Federation:
        folder.mkdir()
        return fresh(folder)

    with tempfile.TemporaryDirectory() as place:
        job = made(Path(place) / "first")
        _check_promise(job)
        changes = changes_for(job) if changes is None else changes
        tell = on_world or (lambda number, worlds, name: None)
        tell(0, len(changes) + 1, "the run's own data")
        first = play(job, Path(place) / "first", rounds=rounds, engine_name=engine)
        if not first.releases:
            raise ConfigError(f"nothing was released in {rounds} rounds, so there is nothing to replay: {_end(first)}")
        others: list[tuple[Neighbour, World]] = []
        for number, neighbour in enumerate(neighbours(job, changes, first.participants)):
            tell(number + 1, len(changes) + 1, str(neighbour))
            folder = Path(place) / f"neighbour-{number}"
            second = made(folder)
            world = play(second, folder, rounds=rounds, engine_name=engine, neighbour=neighbour, first=first.releases)
            others.append((neighbour, world))
    return Replayed(
        job.method.name,
        str(job.setting.scope),
        min(rounds, job.setting.rounds),
        tuple(str(neighbour) for neighbour, _ in others),
        tuple(_checked(job, first, others)),
    )


def _check_promise(job: Federation) -> None:
    for event in releases_to(job.method, job.setting, job.setting.scope.view):
        if isinstance(event, Unbounded):
            raise ConfigError(
                f"{job.method.name} promises nothing here, so a replay has nothing to check ({event.reason}): replay a "
                "configuration with a proven epsilon"
            )


def _end(world: World) -> str:
    return next((note.value[1] for note in world.notes if note.check == END), "")


# --- comparing worlds -------------------------------------------------------------------------------------------------


def _checked(job: Federation, first: World, others: Sequence[tuple[Neighbour, World]]) -> Iterator[WorldComparison]:
    """Each check, in the order in which they first appear."""
    found: dict[str, list[str]] = defaultdict(list)
    _add(found, _verdicts(first), "on the run's own data")
    for neighbour, world in others:
        _add(found, _verdicts(world), str(neighbour))
        _add(found, _public(first, world), str(neighbour))
        _add(found, _contributions(job, first, world, neighbour), str(neighbour))
    for check, problems in found.items():
        yield WorldComparison(check, len(problems), next(filter(None, problems), ""))


def _add(found: dict[str, list[str]], problems: Iterator[tuple[str, str]], world: str) -> None:
    for check, problem in problems:
        found[check].append(f"{world}: {problem}" if problem else "")


def _verdicts(world: World) -> Iterator[tuple[str, str]]:
    for note in world.notes:
        if note.kind == "verdict":
            yield note.check, f"{note.place}: {note.value}" if note.value else ""


def _public(first: World, second: World) -> Iterator[tuple[str, str]]:
    """What must be the same."""
    one, two = (_by_place(world, "public") for world in (first, second))
    for key in [*one, *(key for key in two if key not in one)]:
        missing = key not in one or key not in two
        problem = "only in one of the worlds" if missing else difference(one[key].value, two[key].value)
        yield key[0], f"{(one.get(key) or two[key]).place}: {problem}" if problem else ""


def _contributions(job: Federation, first: World, second: World, neighbour: Neighbour) -> Iterator[tuple[str, str]]:
    """The changed client moves a contribution by the sensitivity at most, and no other client by anything.

    Zero-out adjacency compares with a contribution of zero: at client level the clip alone bounds it, in a DP-SGD step it is that
    of a record that is taken away. A record that is replaced moves a step by twice the clip.
    """
    s = job.setting
    one, two = (_by_place(world, "private", SENSITIVITY) for world in (first, second))
    steps = s.example_clip is not None
    factor = s.scope.update_factor
    if steps:  # what a step declares holds for the run's adjacency
        factor = 1 if neighbour.change.zeroes or s.scope.adjacency is Adjacency.REPLACE_ONE else 2
    for key, note in one.items():
        if key not in two:
            continue
        moved = two[key].value.less(note.value)
        if note.client != neighbour.client:
            yield OTHERS, f"{note.place}: it moved, though its data did not" if moved.integers.any() else ""
        elif not steps or neighbour.change.record:
            compared = moved if factor == 2 or steps else two[key].value
            problem = compared.problem(factor)
            yield SENSITIVITY, f"{note.place}: {problem}" if problem else ""


def _by_place(world: World, kind: str, check: str | None = None) -> dict[tuple[str, int, int, int], Note]:
    """Notes by check, round, client, and which of several there."""
    count: dict[tuple[str, int, int], int] = defaultdict(int)
    found: dict[tuple[str, int, int, int], Note] = {}
    for note in world.notes:
        if note.kind == kind and check in (None, note.check):
            place = (note.check, note.round, note.client)
            found[*place, count[place]] = note
            count[place] += 1
    return found
