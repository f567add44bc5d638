"""One world of a replay: a few rounds of the federation, with everything written down that must not depend on private data."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedveil.accounting.types import SampledGaussian, Unit, View
from fedveil.adversary.replay_door import BATCHES, DRAWN, NOISE, PLANS, Releases, ReplayDoor, recorded_source
from fedveil.adversary.replay_measures import not_drawn_by_poisson
from fedveil.adversary.replay_notes import Diary, Note, difference
from fedveil.adversary.replay_records import ROWS, RowsInMemory
from fedveil.engines.select_engine import engine
from fedveil.errors import BudgetExhausted
from fedveil.federation.fit import one_round
from fedveil.federation.progress import start
from fedveil.federation.round import planned
from fedveil.federation.selection_score import release_score
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Ledger

if TYPE_CHECKING:
    from fedveil.adversary.neighbours import Neighbour
    from fedveil.federation.engine import Engine
    from fedveil.federation.progress import Federation, Progress
    from fedveil.federation.round import ClientTask, Context, Outcome
    from fedveil.release.door import Door
    from fedveil.training.local import GradientSource

TRAINED = "training gives something to release"
PARTICIPANTS = "participants"
BROADCAST = "what clients receive"
PURE = "plans are pure functions, and what is received stays as it was"
STATES = "states of the policy"
MODELS = "global models and the server's step"
HISTORY = "public columns of the history"
SCORE = "the score by which runs are chosen"
ORDER = "number and order of releases"
END = "rounds, and how the run ends"

ROUND = -1
"""The client of what is about a whole round."""


@dataclass(frozen=True)
class World:
    """What was noted in one world. sequential: whether the order of notes is that of events."""

    notes: list[Note]
    sequential: bool

    @property
    def releases(self) -> Releases:
        """What left."""
        return dict(note.value for note in self.notes if note.kind == "release")

    @property
    def participants(self) -> list[int]:
        """Clients that came to the door, those of most rounds first."""
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
        folder: an empty one, for notes and rows. neighbour: whose data take the place of the run's.
        first: what the first world released.
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
        with RecordedEngine(engine(engine_name, context), context, diary, unchanged=first is None) as workers:
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
    """The door with the same budgets on an empty ledger, on disk only where processes share it.

    Noise is seeded, but a release that is made twice is charged twice here.
    """
    if not isinstance(door.ledger, BudgetedLedger):
        return door
    if not shared:
        return replace(door, ledger=RowsInMemory(door.ledger.budgets))
    Ledger.create(folder / "ledger.sqlite", "replay", {}).close()
    return replace(door, ledger=BudgetedLedger(folder / "ledger.sqlite", door.ledger.budgets))


class RecordedEngine:
    """An engine that notes what each client is handed, and checks that nobody changes it."""

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
            self.diary.note("public", BROADCAST, round, task.client, _received(task))
            self.diary.verdict(PURE, round, task.client, self._impure(task))
        for outcome in self.own.map(todo):
            problem = outcome.error if self.unchanged else ""
            self.diary.verdict(TRAINED, round, outcome.client, problem)
            yield outcome
        problem = difference(copies, received)
        self.diary.verdict(PURE, round, ROUND, f"what clients receive was changed in place: {problem}" if problem else "")

    def _impure(self, task: ClientTask) -> str:
        """How two plans made of the same things differ, or from the round's plan."""
        alone = replace(task, common=None, client=ROUND if task.common is not None else task.client)
        plans = [task.common] if task.common is not None else []
        plans += [planned(self.context, alone) for _ in range(2)]
        return next(filter(None, (difference(_plain(plans[0]), _plain(plan)) for plan in plans[1:])), "")


def _plain(plan: Any) -> Any:
    return plan if not hasattr(plan, "make") else (plan.reads, plan.reason)


def _received(task: ClientTask) -> list[Any]:
    released = task.released
    public = [released.model, released.previous, released.public_loss, released.public_update]
    return [*public, task.buffers, task.policy_state, task.weight]


def _note_progress(diary: Diary, progress: Progress) -> None:
    """What is public after a round."""
    public = {
        STATES: {"common": progress.common, "clients": progress.policies, "seen": progress.seen, "last": progress.last},
        MODELS: [progress.model, progress.previous, progress.buffers, progress.server, progress.average],
        HISTORY: progress.history[-1].public,
    }
    for check, value in public.items():
        diary.note("public", check, progress.round - 1, ROUND, value)


# --- what is seen only when the world is complete ---------------------------------------------------------------------


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
    """Which row credits a Poisson sample of clients in a run that draws none, or draws one in sight."""
    s = job.setting
    secret = s.sampling == "poisson" and s.scope.view is not View.SERVER and job.participation is None
    for note in rows:
        inside = s.scope.unit is Unit.RECORD and note.value.note
        if isinstance(note.value.event, SampledGaussian) and note.value.event.rate < 1 and not inside and not secret:
            return f"{note.place} is charged as a secret Poisson sample; sampling is {s.sampling}, the view {s.scope.view}"
    return ""


Fresh = Callable[[Path], "Federation"]
"""Makes a federation with seeded noise that shares nothing with earlier ones; what it keeps on disk is in the folder."""
