"""Which examples of one's own data are for testing: the same whoever else is in the data.

What is drawn for a client comes from a hash of the seed and of its own id, and what is drawn for an example from its place among
its client's examples. So a client who joins or leaves changes nobody else's split: neighbouring data differ in that client alone,
as the guarantee for clients assumes. A split drawn over all examples together would shift everybody's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from fedveil.data.seeding import draws, lots, places
from fedveil.errors import ConfigError, DataError

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
FORMS = (
    "0.2 or {'share': 0.2} (of each client's examples), {'clients': 0.2} (whole clients), {'latest': times, 'share': 0.2} (the "
    "last of each client's), {'latest': times, 'since': date} (all from a public date on), or test data of their own"
)


class SplitRule(BaseModel):
    """clients: share of the clients who are held out as a whole. share: of each client's examples; with latest: the last ones by
    that column, or array of times. since: with latest: all examples from this public time on."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    clients: float | None = Field(None, gt=0, lt=1)
    share: float | None = Field(None, gt=0, lt=1)
    latest: Any = None
    since: Any = None

    @property
    def ranked(self) -> bool:
        """Whether the time of one example may decide if another one of its client is for testing."""
        return self.latest is not None and self.share is not None

    def text(self, owned: bool = True) -> str:
        """The rule in words; owned: whether examples have clients."""
        whole = "each client's examples" if owned else "the examples"
        if self.clients is not None:
            return f"whole clients, each with probability {self.clients:g}"
        by = "" if self.latest is None else f" by {self.latest if isinstance(self.latest, str) else 'time'}"
        if self.share is not None:
            return f"{'a random' if self.latest is None else 'the last'} {self.share:g} of {whole}{by}"
        return f"all examples from {self.since} on{by}"


@dataclass(frozen=True)
class Owners:
    """Who owns each example: codes from 0, and the ids as text by code; one owner of all where nobody is named."""

    codes: Ints
    ids: tuple[str, ...]


def rule_of(test: Any) -> SplitRule | None:
    """The rule that a number or a table of keys describes.

    Raises:
        ConfigError: of another form.
    """
    if test is None or isinstance(test, SplitRule):
        return test
    keys = {"share": test} if isinstance(test, float | int) and not isinstance(test, bool) else test
    forms = ({"clients"}, {"share"}, {"latest", "share"}, {"latest", "since"})
    if not isinstance(keys, Mapping) or set(keys) not in forms:
        raise ConfigError(f"test = {test!r}: give {FORMS}")
    try:
        return SplitRule(**keys)
    except ValueError:
        raise ConfigError(f"test = {test!r}: a share lies between 0 and 1; give {FORMS}") from None


def owners_of(ids: NDArray[Any] | None, examples: int) -> Owners:
    """Codes of the clients, in the order of their ids as text: neither the order of rows nor the type of the ids matters."""
    if ids is None:
        return Owners(np.zeros(examples, np.int64), ("",))
    known, codes = np.unique(ids.astype(np.str_), return_inverse=True)
    return Owners(codes.reshape(-1).astype(np.int64), tuple(known.tolist()))


def held_out(rule: SplitRule, seed: int, owners: Owners, times: NDArray[Any] | None = None) -> Mask:
    """Which examples are for testing.

    Args:
        times: of each example, where the rule goes by them.

    Raises:
        DataError: none is, or all are.
    """
    own = lots(f"{seed}\n{one}" for one in owners.ids)
    if rule.clients is not None:
        mask = (own.astype(np.float64) / 2.0**64 < rule.clients)[owners.codes]
    elif rule.since is not None:
        assert times is not None
        mask = times >= _comparable(rule.since, times)
    else:
        mask = _last(rule.share or 0.0, owners, draws(own, owners.codes) if times is None else times)
    if mask.all() or not mask.any():
        nothing = "nothing to train on" if mask.all() else "no test examples"
        of = f"{len(mask)} examples" if owners.ids == ("",) else f"{len(mask)} examples of {len(owners.ids)} clients"
        raise DataError(
            f"the test split ({rule.text(owners.ids != ('',))}) leaves {nothing} of {of}: take another share, another "
            f"split_seed, or give test data of their own"
        )
    return np.asarray(mask, dtype=np.bool_)


def _last(share: float, owners: Owners, by: NDArray[Any]) -> Mask:
    """The last `share` of each owner's examples by `by`, rounded; all but one at most, so that everybody trains."""
    sizes = np.bincount(owners.codes, minlength=len(owners.ids))
    held = np.minimum(np.floor(share * sizes + 0.5).astype(np.int64), sizes - 1)
    rank = places(owners.codes, by)
    return np.asarray(rank >= (sizes - held)[owners.codes], dtype=np.bool_)


def _comparable(since: Any, times: NDArray[Any]) -> Any:
    try:
        return np.datetime64(since) if times.dtype.kind == "M" else float(since)
    except (TypeError, ValueError):
        kind = "a date, such as '2024-07-01'" if times.dtype.kind == "M" else "a number"
        raise ConfigError(f"test: since = {since!r} cannot be compared with the times: give {kind}") from None
