"""Record and replay: a federation on its data, then on neighbouring data with the first run's releases.

Each of these runs is called a world; all worlds use the same randomness. Values that must not depend on private data must
then be equal in all worlds, and the difference of two contributions must lie within the declared sensitivity. One neighbour
proves nothing, but it shows with certainty a leak through anything but the released numbers.

Source: the idea of an adversarial record and replay of a differentially private program is dp-recorder's (PETS 2026).
"""

from __future__ import annotations

import dataclasses
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedveil.accounting.types import Adjacency, SampledGaussian, Unbounded, Unit, View
from fedveil.attacks.neighbours import Neighbour, changes_for, neighbours
from fedveil.attacks.replay_door import (
    BATCHES,
    DRAWN,
    NOISE,
    PLANS,
    POST_PROCESSED,
    SENSITIVITY,
    UPLOADS,
    WEIGHTS,
    Releases,
    ReplayDoor,
    not_drawn_by_poisson,
    recorded_source,
)
from fedveil.attacks.replay_record import ROWS, Diary, Note, RowsInMemory, difference
from fedveil.errors import BudgetExhausted, ConfigError
from fedveil.executors.select_engine import engine
from fedveil.experiment.assembly import federation
from fedveil.experiment.data_card import NOTHING, HandedOver
from fedveil.experiment.resolve import opened
from fedveil.federation.evaluation import release_score
from fedveil.federation.fit import one_round
from fedveil.federation.progress import start
from fedveil.federation.round import planned
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Ledger
from fedveil.methods.run_cost import events_in_view
from fedveil.training.cores import process_state

if TYPE_CHECKING:
    from fedveil.attacks.neighbours import Change
    from fedveil.experiment.config import Config
    from fedveil.federation.progress import Federation, Progress
    from fedveil.federation.round import ClientTask, Context, Engine, Outcome
    from fedveil.release.door import Door
    from fedveil.training.local import GradientSource


TRAINED = "training gives something to release"
PARTICIPANTS = "participants"
_BROADCAST = "what clients receive"
PURE = "plans are pure functions, and what is received stays as it was"
STATES = "states of the policy"
MODELS = "global models and the server's step"
HISTORY = "public columns of the history"
SCORE = "the score by which runs are chosen"
ORDER = "number and order of releases"
END = "rounds, and how the run ends"

ROUND = -1
"""The client number of notes about a whole round."""


@dataclass(frozen=True)
class World:
    """The notes of one world. sequential: whether the notes are in the order of events."""

    notes: list[Note]
    sequential: bool

    @property
    def releases(self) -> Releases:
        """The releases of this world."""
        return dict(note.value for note in self.notes if note.kind == "release")

    @property
    def participants(self) -> list[int]:
        """Clients that reached the door, those with the most rounds first."""
        seen = [note.client for note in self.notes if note.check == PLANS and note.client >= 0]
        return sorted(set(seen), key=lambda c: (-seen.count(c), c))


def play(
    job: Federation,
    folder: Path,
    *,
    rounds: int,
    engine_name: str,
    neighbour: Neighbour | None = None,
    first: Releases | None = None,
) -> World:
    """Play the first rounds of a fresh federation.

    Args:
        folder: an empty folder for notes and ledger rows. neighbour: the data that replace those of the run.
        first: the releases of the first world.
    """
    diary, releases = Diary(folder), first or {}
    context = job.context
    own = _with_strict_ledger(context.door, folder, shared=engine_name != "inline")
    door = ReplayDoor.of(own, diary, releases)
    make = context.gradients

    def recorded(source: GradientSource) -> GradientSource:
        return recorded_source(make(source), job.setting.scope.adjacency, diary, releases)

    context = replace(context, door=door, gradients=recorded)
    if neighbour is not None:
        context = replace(context, clients=neighbour.clients, tests=neighbour.tests)
    job, progress = replace(job, context=context, client_tests=job.client_tests and context.tests), start(job)
    ended = ""
    try:
        with _RecordedEngine(engine(engine_name, context), context, diary, unchanged=first is None) as workers:
            while progress.round < min(rounds, job.setting.rounds):
                one_round(job, workers, progress)
                _note_progress(diary, progress)
            if (score := release_score(job, progress)) is not None:
                diary.note("public", SCORE, job.setting.rounds, ROUND, score)
    except BudgetExhausted as end:
        ended = str(end)
    except Exception as error:
        if first is None:
            raise
        ended = f"{type(error).__name__}: {error}"
    finally:
        diary.note("public", END, progress.round, ROUND, (progress.round, ended))
        diary.close()
        if isinstance(own.ledger, BudgetedLedger):
            own.ledger.close()
    world = World(diary.read(), engine_name == "inline")
    return replace(world, notes=[*world.notes, *_conclusions(job, world)])


def _with_strict_ledger(door: Door, folder: Path, *, shared: bool) -> Door:
    """Return the door with the same budgets on an empty ledger, on disk only if several processes share it.

    Noise is seeded, but a release that happens twice is charged twice here.
    """
    if not isinstance(door.ledger, BudgetedLedger):
        return door
    if not shared:
        return replace(door, ledger=RowsInMemory(door.ledger.budgets))
    Ledger.create(folder / "ledger.sqlite", "replay", {}).close()
    return replace(door, ledger=BudgetedLedger(folder / "ledger.sqlite", door.ledger.budgets))


class _RecordedEngine:
    """An engine that records the input of each client and checks that nobody changes it."""

    def __init__(self, own: Engine, context: Context, diary: Diary, *, unchanged: bool) -> None:
        self.own, self.context, self.diary, self.unchanged = own, context, diary, unchanged

    def __enter__(self) -> Self:
        self.own.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.own.__exit__(*exc)

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        todo = list(tasks)
        if not todo:
            return
        received = [_received(task) for task in todo]
        copies: list[Any] = pickle.loads(pickle.dumps(received))
        round = todo[0].released.round
        self.diary.note("public", PARTICIPANTS, round, ROUND, [task.client for task in todo])
        for task in todo:
            self.diary.note("public", _BROADCAST, round, task.client, _received(task))
            self.diary.verdict(PURE, round, task.client, self._impure(task, len(todo)))
        for outcome in self.own.map(todo):
            problem = outcome.error if self.unchanged else ""
            self.diary.verdict(TRAINED, round, outcome.client, problem)
            yield outcome
        problem = difference(copies, received)
        self.diary.verdict(PURE, round, ROUND, f"what clients receive was changed in place: {problem}" if problem else "")

    def _impure(self, task: ClientTask, clients: int) -> str:
        """Return how two plans from the same input differ, or differ from the round's plan; an empty string if they do not."""
        alone = replace(task, common=None, client=ROUND if task.common is not None else task.client)
        plans = [task.common] if task.common is not None else []
        made = [planned(self.context, alone) for _ in range(2)]
        plans += [self.context.shared(plan, clients) for plan in made] if task.common is not None else made
        return next(filter(None, (difference(_plain(plans[0]), _plain(plan)) for plan in plans[1:])), "")


def _plain(plan: Any) -> Any:
    return plan if not hasattr(plan, "make") else (plan.reads, plan.reason)


def _received(task: ClientTask) -> list[Any]:
    released = task.released
    public = [released.model, released.previous, released.public_loss, released.public_update]
    return [*public, task.buffers, task.policy_state, task.weight]


def _note_progress(diary: Diary, progress: Progress) -> None:
    """Record the public values after a round."""
    public = {
        STATES: {"common": progress.common, "clients": progress.policies, "seen": progress.seen, "last": progress.last},
        MODELS: [progress.model, progress.previous, progress.buffers, progress.server, progress.average],
        HISTORY: progress.history[-1].public,
    }
    for check, value in public.items():
        diary.note("public", check, progress.round - 1, ROUND, value)


# --- checks of a complete world ---------------------------------------------------------------------------------------


def _conclusions(job: Federation, world: World) -> Iterator[Note]:
    def public(check: str) -> list[Note]:
        return [note for note in world.notes if note.kind == "public" and note.check == check]

    rows = [(note.round, note.client) for note in public(ROWS)]
    yield Note("public", ORDER, 0, ROUND, rows if world.sequential else sorted(rows))
    digests = [digest for note in public(NOISE) for digest in note.value]
    again = len(digests) - len(set(digests))
    yield Note("verdict", DRAWN, 0, ROUND, f"{again} of {len(digests)} releases carry the noise of another" if again else "")
    batches = [note.value for note in world.notes if note.kind == "private" and note.check == BATCHES]
    yield Note("verdict", BATCHES, 0, ROUND, not_drawn_by_poisson(batches) or _unsampled(job, public(ROWS)))


def _unsampled(job: Federation, rows: list[Note]) -> str:
    """Return which row is charged as a secret Poisson sample of clients although the run draws none, or draws one in public."""
    s = job.setting
    secret = s.sampling == "poisson" and s.scope.view is not View.SERVER and job.participation is None
    for note in rows:
        inside = s.scope.unit is Unit.RECORD and note.value.note
        if isinstance(note.value.event, SampledGaussian) and note.value.event.rate < 1 and not inside and not secret:
            return f"{note.place} is charged as a secret Poisson sample; sampling is {s.sampling}, the view {s.scope.view}"
    return ""


Fresh = Callable[[Path], "Federation"]
"""A function that makes a federation with seeded noise, independent of earlier ones; it writes to the given folder only."""


OTHERS = "contributions of all other clients"

_COMPARED = (
    PARTICIPANTS,
    _BROADCAST,
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
"""A callback before each world: its number from 0, the number of worlds, and its name."""


@dataclass(frozen=True)
class WorldComparison:
    """The result of one check over all worlds.

    Args:
        compared: number of compared values. finding: the first wrong value and its world; empty if there is none.
    """

    check: str
    compared: int
    finding: str = ""

    @property
    def holds(self) -> str:
        """Return whether the check found nothing wrong."""
        return "identical" if self.check in _COMPARED else "holds"


@dataclass(frozen=True)
class Replayed:
    """The results of a replay. rounds: number of replayed rounds. worlds: the neighbours."""

    method: str
    scope: str
    rounds: int
    worlds: tuple[str, ...]
    checks: tuple[WorldComparison, ...]

    @property
    def findings(self) -> dict[str, str]:
        """The findings by check; empty if there are none."""
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
    """Replay the first rounds of a configuration on all neighbours of its unit of privacy; no ledger of a run is charged.

    Args:
        rounds: the most replayed rounds. engine: `inline`, or `pool`, which does not check the order of releases.
        on_world: callback for progress. handed_over: data and partition that replace the configured ones.

    Raises:
        ConfigError: the configuration promises nothing, or its first release is refused.
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
    """Replay federations that a program makes, as `replay` does.

    Args:
        fresh: see `Fresh`. changes: some of `neighbours.CHANGES`; by default all of the unit of privacy.
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
    for event in events_in_view(job.method, job.setting, job.setting.scope.view):
        if isinstance(event, Unbounded):
            raise ConfigError(
                f"{job.method.name} promises nothing here, so a replay has nothing to check ({event.reason}): replay a "
                "configuration with a proven epsilon"
            )


def _end(world: World) -> str:
    return next((note.value[1] for note in world.notes if note.check == END), "")


# --- comparing worlds -------------------------------------------------------------------------------------------------


def _checked(job: Federation, first: World, others: Sequence[tuple[Neighbour, World]]) -> Iterator[WorldComparison]:
    """Yield one result per check, which covers all worlds; checks come in the order in which the worlds first made them."""
    problems_by_check: dict[str, list[str]] = defaultdict(list)
    _add(problems_by_check, _verdicts(first), "on the run's own data")
    for neighbour, world in others:
        _add(problems_by_check, _verdicts(world), str(neighbour))
        _add(problems_by_check, _public_differences(first, world), str(neighbour))
        _add(problems_by_check, _contributions(job, first, world, neighbour), str(neighbour))
    for check, problems in problems_by_check.items():
        yield WorldComparison(check, len(problems), next(filter(None, problems), ""))


def _add(problems_by_check: dict[str, list[str]], problems: Iterator[tuple[str, str]], world: str) -> None:
    for check, problem in problems:
        problems_by_check[check].append(f"{world}: {problem}" if problem else "")


def _verdicts(world: World) -> Iterator[tuple[str, str]]:
    for note in world.notes:
        if note.kind == "verdict":
            yield note.check, f"{note.place}: {note.value}" if note.value else ""


def _public_differences(first: World, second: World) -> Iterator[tuple[str, str]]:
    """Yield each public value that should be equal in both worlds, with the difference if there is one."""
    one, two = (_by_place(world, "public") for world in (first, second))
    for key in [*one, *(key for key in two if key not in one)]:
        missing = key not in one or key not in two
        problem = "only in one of the worlds" if missing else difference(one[key].value, two[key].value)
        yield key[0], f"{(one.get(key) or two[key]).place}: {problem}" if problem else ""


def _contributions(job: Federation, first: World, second: World, neighbour: Neighbour) -> Iterator[tuple[str, str]]:
    """Check that the contribution of the changed client moves by the sensitivity at most, and that of other clients not at all.

    Zero-out adjacency compares with a contribution of zero: at client level the clip alone bounds it; in a DP-SGD step it is the
    contribution without the record. A replaced record moves a step by up to twice the clip.
    """
    s = job.setting
    one, two = (_by_place(world, "private", SENSITIVITY) for world in (first, second))
    steps = s.example_clip is not None
    factor = s.scope.update_factor
    if steps:  # the bound of a step is declared for the run's adjacency
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
    """Return the notes by check, round, client and position among several of these."""
    count: dict[tuple[str, int, int], int] = defaultdict(int)
    notes: dict[tuple[str, int, int, int], Note] = {}
    for note in world.notes:
        if note.kind == kind and check in (None, note.check):
            place = (note.check, note.round, note.client)
            notes[*place, count[place]] = note
            count[place] += 1
    return notes
