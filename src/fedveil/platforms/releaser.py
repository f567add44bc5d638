"""Differentially private releases for any platform: dicts of numpy arrays in and out, through the mechanism of fedveil's runs.

    release = fv.Releaser(clip=1.0, epsilon=8, delta=1e-5, rounds=20, clients=12, ledger="site-a.ledger")
    noisy = release(update)
    print(release.statement)

`Releaser` adds noise to each client's update (server view). `NoisyMean` adds noise once, to the sum of a round's updates
(aggregate view). The unit is the client, and the adjacency zero-out. Every release is charged to a ledger before it is returned,
and the ledger is a lifetime: releases of earlier processes count.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedveil.accounting.types import Adjacency, Scope, Unit, View, small
from fedveil.errors import BudgetExhausted, ConfigError, LedgerError, UpdateRefused
from fedveil.ledger.files import was_begun
from fedveil.platforms.array_layout import ArrayLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedveil.ledger.budgeted_ledger import BudgetedLedger
    from fedveil.methods.base import Setting
    from fedveil.methods.method import Method
    from fedveil.platforms.array_layout import Arrays
    from fedveil.release.array_door import ArrayDoor
    from fedveil.statement.statement_layout import PrintedStatement

PROJECT = "releaser"
"""Project under which releases are charged; their names go on with a digest of the arrays, and the numbers."""
ITSELF = 0
"""Number under which a client counts itself in its own ledger."""
AGGREGATE = -1
"""Number under which the ledger counts all clients together."""
_LAYOUT, _CHOSEN, _POSITION = "layout", "chosen", "position"
"""Things that a releaser remembers: its layout, whether `like` chose it, and how far its ledger was charged."""
_LARGEST = 1e30
"""Largest clip and noise std; float32 holds sums of them, and the inverse is the smallest."""
_ASSUMED = (
    (
        "the update depends on the data of its client alone, and is all that the program sends of them",
        "fedveil sees neither how the update was made nor what the program sends besides",
    ),
    (
        "the names, types and shapes of the arrays, and whether an update is refused, say nothing about the data",
        "everybody sees these, and no noise hides them; None releases a noised zero instead of a refusal",
    ),
    (
        "the ledger holds every release of these data: one ledger for each client, or for each federation that is summed",
        "what is charged to another ledger adds to what this one promises",
    ),
)
"""Assumptions about a program that fedveil does not run, each with its reason."""


@dataclass(frozen=True, eq=False)
class LifetimeReleases:
    """Releases under one clip and one noise that share a lifetime budget; base of `Releaser` and `NoisyMean`.

    Args:
        clip: C, L2 bound on an update. epsilon, delta: total of all releases in the ledger. rounds: number of releases that the
            total is for; it determines the noise. clients: number of clients of the federation.
        ledger: file of the ledger, created at the first release. Processes may share it. Other arrays than those that it holds
            releases of need `like`.
        like: an update, or the model, whose names, types and shapes all updates have; by default the first update decides.
        seed: makes the noise reproducible, for simulations only: it then protects nobody.

    Raises:
        ConfigError: a number is out of range, or the ledger belongs to other numbers. LedgerError: the ledger is damaged.
    """

    clip: float
    _: KW_ONLY
    epsilon: float
    delta: float
    rounds: int
    clients: int
    ledger: str | Path
    like: Mapping[str, NDArray[Any]] | None = field(default=None, repr=False)
    seed: int | None = None
    _memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    _VIEW: ClassVar[View]

    def __post_init__(self) -> None:
        path = Path(self.ledger).expanduser().absolute()
        numbers = {key: positive_number(key, getattr(self, key)) for key in ("clip", "epsilon", "delta")}
        counts = {key: whole_number(key, getattr(self, key)) for key in ("rounds", "clients")}
        seed = None if self.seed is None else whole_number("seed", self.seed, 0)
        for key, value in {**numbers, **counts, "ledger": path, "seed": seed}.items():
            object.__setattr__(self, key, value)
        if not path.parent.is_dir():
            raise ConfigError(f"ledger = '{path}': there is no folder {path.parent}: create it", key="ledger", value=path)
        if self.like is not None:
            self._memory.update({_LAYOUT: ArrayLayout.of(self.like), _CHOSEN: True})
            object.__setattr__(self, "like", None)
        _ = self._setting  # refuses numbers for which no noise exists
        if was_begun(path):
            with self._ledger():
                pass

    @property
    def statement(self) -> PrintedStatement:
        """Return the privacy statement; `print` shows what `fedveil certify` prints.

        Raises:
            ConfigError: no update has fixed the layout yet.
        """
        from fedveil.experiment.certify import certify
        from fedveil.statement.statement import Assumption
        from fedveil.statement.statement_layout import PrintedStatement

        layout = self._fixed_layout("the statement says how many numbers a release has")
        integers = ", ".join(layout.untouched)
        statement = certify(
            _method(self.clip),
            replace(self._setting, layout=layout.flat),
            seeded_noise=self.seed is not None,
            batch_norm=False,
            public=tuple(Assumption(*one) for one in _ASSUMED),
            extra_disclosures=(f"integer arrays leave unchanged, without noise, and no epsilon covers them: {integers}",)
            * bool(integers),
        )
        return PrintedStatement.of(statement)

    @property
    def noise_std(self) -> float:
        """Return the standard deviation of the noise on each number of what is released: an update, or a sum of updates."""
        return self._setting.z * self.clip

    def _fixed_layout(self, why: str) -> ArrayLayout:
        if _LAYOUT not in self._memory:
            raise ConfigError(f"{why}, and no update has shown that yet: release an update first, or give like=", key="like")
        layout: ArrayLayout = self._memory[_LAYOUT]
        return layout

    def _split(self, update: object) -> tuple[NDArray[np.float32], Arrays]:
        """Return the released numbers and the integer arrays of an update; the first one fixes the layout of all."""
        layout = self._memory.get(_LAYOUT) or ArrayLayout.of(update)
        parts = layout.split(update)
        fixed = self._memory.setdefault(_LAYOUT, layout)
        return parts if fixed == layout else fixed.split(update)  # another thread was first

    @contextmanager
    def _door(self) -> Iterator[tuple[ArrayDoor, int]]:
        """Yield the open door, and the number of releases that the ledger holds.

        Raises:
            BudgetExhausted: nothing is left for a release. UpdateRefused: the ledger holds releases of other arrays.
                ConfigError, LedgerError: as in the constructor.
        """
        from fedveil.methods.base import gaussian_plan
        from fedveil.release.array_door import ArrayDoor
        from fedveil.release.noise import Randomness

        with self._ledger() as ledger:
            self._check_arrays(ledger.runs)
            randomness = Randomness(self.seed or 0, self.seed is not None)
            plan, layout = gaussian_plan(self._setting, self.clip), self._memory[_LAYOUT].flat
            door = ArrayDoor(plan, layout, self._scope, self._run, ledger, randomness)
            if not door.admits(self._who):
                raise BudgetExhausted(
                    f"{self.ledger}: nothing is left for another release of epsilon = {self.epsilon:g} in {self.rounds} rounds; "
                    f"nothing was released. What the ledger holds was released and counts for the lifetime of these data"
                )
            yield door, ledger.position[0]

    @contextmanager
    def _ledger(self) -> Iterator[BudgetedLedger]:
        """Yield the open ledger, which the first release creates, in whatever process; remember how far it was charged.

        Raises:
            ConfigError: it was made with other numbers. LedgerError: it is damaged, or is not the one that was charged before.
        """
        from fedveil.ledger.population_budget import lifetime_budget

        path, position = Path(self.ledger), self._memory.get(_POSITION)
        if position is not None and not path.exists():
            raise LedgerError(
                f"{path} was removed while a releaser used it: {position[0]} releases were charged to it, which still count. "
                f"Nothing was released: put it back together with its -head"
            )
        run = self._run if _LAYOUT in self._memory else PROJECT
        ledger = lifetime_budget(path, self.epsilon, self.delta, self._scope).ledger(run, self._who)
        try:
            ledger.check_continues(position or ledger.position)
            yield ledger
            self._memory[_POSITION] = ledger.position
        finally:
            ledger.close()

    def _check_arrays(self, runs: Iterable[str]) -> None:
        """Refuse arrays that the first update of this object alone has chosen, where the ledger holds releases of others.

        Raises:
            UpdateRefused: the ledger holds releases of other arrays, and of none with these names, types and shapes.
        """
        others = [run for run in runs if run.startswith(f"{PROJECT}/")]
        if others and _CHOSEN not in self._memory and not any(run.startswith(self._arrays) for run in others):
            layout = self._memory.pop(_LAYOUT)
            raise UpdateRefused(
                f"{self.ledger} holds releases of other arrays than {layout}: give the same names, types and shapes, or, for "
                f"another model on the same data, like=; nothing was released"
            )

    @property
    def _who(self) -> int:
        return ITSELF if self._scope.view is View.SERVER else AGGREGATE

    @property
    def _arrays(self) -> str:
        return f"{PROJECT}/{self._memory[_LAYOUT].digest}"

    @property
    def _run(self) -> str:
        """Return the name of these releases in the ledger, in which releases of other arrays or numbers have another one."""
        return f"{self._arrays}, clip {self.clip:g}, {self.rounds} rounds, {self.clients} clients"

    @property
    def _scope(self) -> Scope:
        return Scope(Unit.CLIENT, Adjacency.ZERO_OUT, self._VIEW)

    @cached_property
    def _setting(self) -> Setting:
        numbers = {key: getattr(self, key) for key in ("clip", "epsilon", "delta", "rounds", "clients")}
        return federation_setting(**numbers, scope=self._scope)


@dataclass(frozen=True, eq=False)
class Releaser(LifetimeReleases):
    """Releases of one client's updates, each with noise of its own (server view).

    The result has the names, order, types and shapes of the first update. Floating-point arrays are clipped together, to L2 norm
    C, and noised. Integer arrays, such as counters of batches, pass unchanged, and the statement names them. Every other update
    is refused before anything leaves: NaN, infinite values, other types, other arrays than the first time.

    Args:
        clip, epsilon, delta, rounds, clients, ledger, like, seed: as in `LifetimeReleases`; the ledger is that of one client.
        view: "server", which sees every upload. `NoisyMean` is for a server that is trusted with the updates.
    """

    view: Literal["server"] = "server"
    _VIEW: ClassVar[View] = View.SERVER

    def __post_init__(self) -> None:
        if self.view != "server":
            raise ConfigError(
                f"view = {self.view!r}: a Releaser is for view = 'server'; NoisyMean adds noise once, to a sum (aggregate view)",
                key="view",
                value=self.view,
                allowed=("server",),
            )
        super().__post_init__()

    def __call__(self, update: Mapping[str, NDArray[Any]] | None) -> Arrays:
        """Return the noisy update; it is charged to the ledger before this returns.

        Args:
            update: arrays by name; None releases a noised zero, for a round in which training failed.

        Raises:
            UpdateRefused: the update may not be released. BudgetExhausted: the lifetime is spent. LedgerError: the charge cannot
                be recorded. Nothing was released.
        """
        if update is None:
            layout = self._fixed_layout("a noised zero has the arrays of an update")
            if layout.untouched:
                raise UpdateRefused(
                    f"a noised zero has no values for the integer arrays {list(layout.untouched)}: give the update"
                )
            vector, integers = layout.zero, dict[str, Any]()
        else:
            vector, integers = self._split(update)
        with self._door() as (door, round):
            released = door.release(door.encode(vector), ITSELF, round)
        return self._fixed_layout("an answer has the arrays of an update").joined(released, integers)


@dataclass(frozen=True, eq=False)
class NoisyMean(LifetimeReleases):
    """Means of a round's updates with noise on the sum, for a server that is trusted with the updates (aggregate view).

    The mean divides by `clients`, whoever contributed. An integer array is refused: it has no noisy mean.

    Args:
        clip, epsilon, delta, rounds, clients, ledger, like, seed: as in `LifetimeReleases`; the ledger is that of the server.
        place: "sum", where the noise is added.
    """

    place: Literal["sum"] = "sum"
    _VIEW: ClassVar[View] = View.AGGREGATE

    def __post_init__(self) -> None:
        if self.place != "sum":
            raise ConfigError(
                f"place = {self.place!r}: a NoisyMean adds noise to the sum (place = 'sum'); Releaser adds it to each upload",
                key="place",
                value=self.place,
                allowed=("sum",),
            )
        super().__post_init__()

    def __call__(self, updates: Iterable[Mapping[str, NDArray[Any]] | None]) -> Arrays:
        """Return the noisy mean of one update of each client; it is charged to the ledger before this returns.

        Args:
            updates: at most `clients`; None, or an absent update, counts as zero.

        Raises:
            UpdateRefused: one of them may not be released, as for a `Releaser`. BudgetExhausted: the lifetime is spent.
                LedgerError: the charge cannot be recorded. Nothing was released.
        """
        vectors = [self._vector(place, update) for place, update in enumerate(updates) if update is not None]
        if len(vectors) > self.clients:
            raise UpdateRefused(f"{len(vectors)} updates of clients = {self.clients}: a client contributes once per round")
        layout = self._fixed_layout("a noised zero has the arrays of an update")
        with self._door() as (door, round):
            released = door.release_mean([door.encode(vector) for vector in vectors], round, self.clients)
        return layout.joined(released, {})

    def _vector(self, place: int, update: object) -> NDArray[np.float32]:
        try:
            vector, integers = self._split(update)
        except UpdateRefused as problem:
            raise UpdateRefused(f"update {place}: {problem}; give None for a client that contributes nothing") from None
        if integers:
            raise UpdateRefused(f"update {place}: the integer arrays {list(integers)} have no noisy mean: leave them out")
        return vector


def federation_setting(clip: float, epsilon: float, delta: float, rounds: int, clients: int, *, scope: Scope) -> Setting:
    """Return the setting of a federation all of whose clients release one number per round, with the noise that epsilon needs.

    The noise does not depend on how many numbers are released. Every door of a program that fedveil does not run has its numbers
    from here.

    Raises:
        ConfigError: a number is out of range, or no noise is enough.
    """
    from fedveil.methods.base import Setting
    from fedveil.statement.scope_checks import is_vacuous
    from fedveil.training.local import LocalSpec
    from fedveil.training.params import Layout

    numbers = {"clip": clip, "epsilon": epsilon, "delta": delta}
    clip, epsilon, delta = (positive_number(key, value) for key, value in numbers.items())
    rounds, clients = whole_number("rounds", rounds), whole_number("clients", clients)
    if is_vacuous(delta, clients):
        raise ConfigError(
            f"delta = {small(delta)} is not possible: publishing one of clients = {clients} at random would satisfy it; give one "
            f"below 1 / {clients}",
            key="delta",
            value=delta,
        )
    one = Layout(("update",), ((1,),))
    clipped_at: Literal["client", "server"] = "client" if scope.view is View.SERVER else "server"
    planned = Setting(clients, clients, rounds, "fixed", LocalSpec(), one, 1, 1, scope, delta, epsilon, clipped_at=clipped_at)
    setting = _method(clip).calibrate(planned)
    std = setting.z * clip
    if not all(1 / _LARGEST <= value <= _LARGEST for value in (clip, std)):
        raise ConfigError(
            f"clip = {clip:g} is not possible: with its noise of std {std:.3g} it must be between {1 / _LARGEST:g} and "
            f"{_LARGEST:g}, which float32 holds: scale the update",
            key="clip",
            value=clip,
        )
    return setting


def _method(clip: float) -> Method:
    from fedveil.methods.method_registry import method_from

    return method_from({"name": "dp-fedavg", "clip": clip})


def positive_number(key: str, value: object) -> float:
    """Return a finite number > 0 as a float; numpy's scalars are numbers."""
    try:
        if isinstance(value, bool | str | bytes) or not (0 < (number := float(value)) < math.inf):  # type: ignore[arg-type]
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{key} = {value!r} is not possible: give a finite number > 0", key=key, value=value) from None
    return number


def whole_number(key: str, value: object, least: int = 1) -> int:
    """Return a whole number as an int; numpy's integers are whole numbers."""
    try:
        if isinstance(value, bool) or (number := operator.index(value)) < least:  # type: ignore[arg-type]
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"{key} = {value!r} is not possible: give a whole number >= {least}", key=key, value=value) from None
    return number
