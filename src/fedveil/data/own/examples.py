"""LabelledExamples of one's own and their test split, put together as a `Dataset`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import Info
from fedveil.data.dataset import Dataset
from fedveil.data.origin import Origin
from fedveil.data.own.casts import Labelled
from fedveil.data.own.own_split import SplitRule, held_out, owners_of
from fedveil.errors import DataError

Array = NDArray[Any]
OWN_TEST = "test data of their own"


@dataclass(frozen=True)
class LabelledExamples:
    """Inputs and labelled targets, with the id of each one's client and its time where they have them."""

    x: Array
    labelled: Labelled
    ids: Array | None = None
    times: Array | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.labelled.y):
            raise DataError(f"x has {len(self.x)} examples and y has {len(self.labelled.y)}: give one target for each example")


def rule_text(rule: SplitRule | None, owners: bool) -> str:
    """The rule that applies, in words."""
    return _rule(rule, owners).text(owners)


def divided(examples: LabelledExamples, rule: SplitRule | None, seed: int, info: Info, origin: Origin) -> Dataset:
    """Split by the rule; by default whole clients are held out, for figures on the test set are published without noise.

    Raises:
        DataError: as `held_out`; or the rule needs clients, and there are none.
    """
    owners = owners_of(examples.ids, len(examples.x))
    rule = _rule(rule, examples.ids is not None)
    if rule.clients is not None and examples.ids is None:
        raise DataError(f"test = {{'clients': {rule.clients:g}}} holds out clients, and none are named: give client=...")
    origin = replace(origin, ranked=rule.ranked, timed=rule.latest is not None)
    test = held_out(rule, seed, owners, examples.times)
    x, y = examples.x, examples.labelled.y
    users = None if examples.ids is None else owners.codes[~test]
    return _dataset(info, origin, (x[~test], y[~test]), (x[test], y[test]), users)


def separate(examples: LabelledExamples, test: LabelledExamples, info: Info, origin: Origin) -> Dataset:
    """With test data of their own."""
    users = None if examples.ids is None else owners_of(examples.ids, len(examples.x)).codes
    return _dataset(info, origin, (examples.x, examples.labelled.y), (test.x, test.labelled.y), users)


def _rule(rule: SplitRule | None, owners: bool) -> SplitRule:
    return rule or (SplitRule(clients=0.2) if owners else SplitRule(share=0.2))


def _dataset(info: Info, origin: Origin, train: tuple[Array, Array], test: tuple[Array, Array], users: Array | None) -> Dataset:
    people = 0 if users is None else len(np.unique(users))
    info = replace(info, train_size=len(train[1]), test_size=len(test[1]), users=people)
    return Dataset(info, *train, *test, users, origin=origin)
