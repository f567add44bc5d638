"""A private search replayed: the same released numbers with other private ones, and the best run alone, must end the same.

What one run lets out is the matter of `fedveil replay`. Here runs are made once and handed over to the search in each world, so
that whatever differs in the end was made of private values, of a loser, or of the number of runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedveil.accounting.selection import Selection
from fedveil.experiment.assembly import prepare
from fedveil.experiment.resolve import data_spec, resolve_here
from fedveil.experiment.result import Result
from fedveil.experiment.run import train
from fedveil.studies.tune.search import BOOKED, Chance, SearchSpec

Attempt = Callable[..., Result]
Search = Callable[[SearchSpec, Path, Selection, Chance, Attempt], object]
"""A search that makes its runs by `attempt(config, prepared, folder)`."""

EXCHANGED = "the runs' private parts exchanged"
ALONE = "the best run alone"


@dataclass(frozen=True)
class Kept:
    """Runs that were made once: what each returned, and its directory."""

    place: Path
    results: list[Result]

    @classmethod
    def of(cls, spec: SearchSpec, selection: Selection, place: Path) -> Kept:
        """A run of each setting."""
        configs = spec.candidates({"runs": selection.runs, "shape": selection.shape})
        ready = [(config, prepare(data_spec(config))) for config in configs]
        made = [train(resolve_here(c, data.population), data, place / str(i)) for i, (c, data) in enumerate(ready)]
        return cls(place, made)

    def handed_over(self, public: int, private: int, folder: Path) -> Result:
        """What is public of one run with what is private of another."""
        shutil.copytree(self.place / str(public), folder)
        shutil.rmtree(folder / "private")
        shutil.copytree(self.place / str(private) / "private", folder / "private")
        own, other = self.results[public], self.results[private]
        shown = [{k for k in row if k.startswith("test_") or own.columns[k].public} for row in own.history]
        rows = zip(shown, own.history, other.history, strict=True)
        history = [{k: (one if k in names else two)[k] for k in one} for names, one, two in rows]
        return replace(own, history=history, path=folder)

    @property
    def best(self) -> int:
        """The run with the highest released score, the first of equals."""
        scores = [result.selection_score or 0.0 for result in self.results]
        return scores.index(max(scores))


def replayed_search(search: Search, spec: SearchSpec, selection: Selection, kept: Kept, place: Path) -> dict[str, str]:
    """What of a search depends on more than its best run's released numbers, by world; empty where nothing does."""
    runs = range(len(kept.results))
    orders = {"": (runs, runs), EXCHANGED: (runs, runs[::-1]), ALONE: ([kept.best], [kept.best])}
    played = [_played(search, spec, selection, place / f"world-{i}", kept, *order) for i, order in enumerate(orders.values())]
    first, found = played[0], {}
    for name, other in zip(orders, played, strict=True):
        if differing := [key for key in first | other if first.get(key) != other.get(key)]:
            found[name] = ", ".join(differing)
    return found


def _played(
    search: Search, spec: SearchSpec, selection: Selection, out: Path, kept: Kept, public: Sequence[int], private: Sequence[int]
) -> dict[str, bytes]:
    """All that a search leaves and shows which makes these runs."""
    law, said, runs = selection.law, io.StringIO(), len(public)
    assert law is not None
    picks, pairs = iter(public), iter(zip(public, private, strict=True))

    def attempt(config: Any, prepared: Any, folder: Path) -> Result:
        return kept.handed_over(*next(pairs), folder)

    edge = sum(law.probability_of(k) for k in range(1, runs)) + law.probability_of(runs) / 2
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        search(spec, out, selection, Chance(lambda n: int(edge * 2**n), lambda n: next(picks)), attempt)
    left = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    left[BOOKED] = json.dumps({k: v for k, v in json.loads(left[BOOKED]).items() if k != "name"}).encode()
    return {**left, "what is shown": said.getvalue().encode()}
