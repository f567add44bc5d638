"""What follows a run round by round: the protocol, and how trackers are found by name.

A tracker is found through the entry points of the group `fedveil.trackers`, so that a package of one's own can bring one.
What it is told is what the run directory holds: training losses and clients' accuracies in it are computed from private data
without noise, so a tracker must be as private as the run directory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Literal, Protocol

from fedveil.errors import FedveilError, unknown
from fedveil.run.tracked_values import Begun

if TYPE_CHECKING:
    from fedveil.federation.history import Row

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker(Protocol):
    """Something that follows a run. What `begin` raises ends the run before training; afterwards it costs the tracker only."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def begin(self, begun: Begun) -> None:
        """Before the first round."""
        ...

    def round(self, record: Row) -> None:
        """After each round, with the history's new row."""
        ...

    def end(self, status: Status) -> None:
        """When all files of the run are written, or when it was cut short."""
        ...


def tracker_named(name: str) -> Tracker:
    """A new tracker of that name, as `run.track` gives it.

    Raises:
        ConfigError: no installed package brings it.
    """
    found = entry_points(group="fedveil.trackers")
    if name not in found.names:
        raise unknown("run.track", name, "tracker", sorted(found.names))
    make: Callable[[], Tracker] = found[name].load()
    return make()


@contextmanager
def following(trackers: Sequence[Tracker], begun: Begun) -> Iterator[Callable[[Row], None]]:
    """Begin with all trackers, hand each round's row to them, and end them however the run ends.

    A tracker that fails after training has begun is not called again, and a warning says so; the run goes on.

    Raises:
        FedveilError: a tracker cannot begin.
    """
    active: list[Tracker] = []

    def each(tell: Callable[[Tracker], None]) -> None:
        for tracker in list(active):
            try:
                tell(tracker)
            except Exception as error:
                active.remove(tracker)
                warnings.warn(
                    f"{tracker.name} failed and is not called again in this run ({type(error).__name__}: {error}); "
                    f"everything is in {begun.path}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    status: Status = "FAILED"
    try:
        for tracker in trackers:
            try:
                tracker.begin(begun)
            except Exception as error:
                raise FedveilError(
                    f"{tracker.name} cannot follow the run: {type(error).__name__}: {error}; nothing was trained: "
                    f"leave it out of run.track, or put it right and resume {begun.path}"
                ) from error
            active.append(tracker)
        yield lambda record: each(lambda tracker: tracker.round(record))
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        each(lambda tracker: tracker.end(status))
