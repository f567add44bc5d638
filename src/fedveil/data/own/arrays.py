"""User-provided arrays and tensors as a data set with a test split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import Info
from fedveil.data.dataset import Dataset, Origin
from fedveil.data.own.cards import ArrayCard, SplitRule, checked_card, held_out, owners_of
from fedveil.data.own.casts import Labelled, array_of, as_ids, as_inputs, as_targets, as_times
from fedveil.errors import ConfigError, DataError

Array = NDArray[Any]
OWN_TEST = "test data of their own"


@dataclass(frozen=True)
class LabelledExamples:
    """Inputs and labelled targets, with the client's id and the time of each example if there are any."""

    x: Array
    labelled: Labelled
    ids: Array | None = None
    times: Array | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.labelled.y):
            raise DataError(f"x has {len(self.x)} examples and y has {len(self.labelled.y)}: give one target for each example")


def rule_text(rule: SplitRule | None, owners: bool) -> str:
    """Describe the rule that applies."""
    return _rule(rule, owners).text(owners)


_ONE_CLIENT = "the test set is one client, so the score is that client's: give test={'share': 0.2}, or test data of your own"


def divided(examples: LabelledExamples, rule: SplitRule | None, seed: int, info: Info, origin: Origin) -> Dataset:
    """Split by the rule; by default hold out whole clients, since figures on the test set are published without noise.

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
    if rule.clients is not None and len(np.unique(owners.codes[test])) == 1:
        origin = replace(origin, notes=(*origin.notes, _ONE_CLIENT))
    return _dataset(info, origin, (x[~test], y[~test]), (x[test], y[test]), users)


def separate(examples: LabelledExamples, test: LabelledExamples, info: Info, origin: Origin) -> Dataset:
    """Make a data set of training arrays and separate test arrays."""
    users = None if examples.ids is None else owners_of(examples.ids, len(examples.x)).codes
    return _dataset(info, origin, (examples.x, examples.labelled.y), (test.x, test.labelled.y), users)


def _rule(rule: SplitRule | None, owners: bool) -> SplitRule:
    return rule or (SplitRule(clients=0.2) if owners else SplitRule(share=0.2))


def _dataset(info: Info, origin: Origin, train: tuple[Array, Array], test: tuple[Array, Array], users: Array | None) -> Dataset:
    people = 0 if users is None else len(np.unique(users))
    info = replace(info, train_size=len(train[1]), test_size=len(test[1]), users=people)
    return Dataset(info, *train, *test, users, origin=origin)


def from_arrays(x: Any, y: Any, *, client: Any = None, test: Any = None, **public: Any) -> Dataset:
    """Make a data set of arrays, tensors or lists, for `fv.train(config, data=...)`.

    Args:
        x: (examples, ...): features, float or integer; pictures (examples, channels, height, width), uint8; tokens
            (examples, length), integers, with `vocabulary`. y: (examples, ...): classes, integer or bool, or text with `classes`;
            quantities, float.
        client: the owner of each example, an integer or text. The owners are the clients, unless the configuration has a
        partition.
        test: which examples are for testing (see `own_split`), or (x, y) of their own. Left out, a fifth of the clients.
        public: what is public: name, classes, unit, features, mean, std, scale, vocabulary, split_seed (see `ArrayCard`).

    Raises:
        DataError: values that no cast without loss makes right; the message says what to do. ConfigError: an impossible argument.
    """
    return of_arrays((x, y), client, test, public, "arrays")


def of_arrays(pair: tuple[Any, Any], client: Any, test: Any, public: dict[str, Any], source: str) -> Dataset:
    """Do the same as `from_arrays`, with the name of the arrays' source."""
    own_test = test if isinstance(test, tuple | list) and len(test) == 2 else None
    card = checked_card(ArrayCard, test=None if own_test is not None else test, **public)
    rule = card.test
    examples, casts = _examples(pair, card, client, None if rule is None else rule.latest)
    info = array_info(card, examples.x.shape[1:], examples.labelled, examples.x.dtype == np.uint8)
    text = rule_text(rule, client is not None) if own_test is None else OWN_TEST
    origin = Origin(source, text, card.features, casts, counted=examples.labelled.counted)
    if own_test is None:
        return divided(examples, rule, card.split_seed, info, origin)
    fixed = card.model_copy(update={"classes": card.classes or examples.labelled.classes})
    return separate(examples, _examples((own_test[0], own_test[1]), fixed, None, None)[0], info, origin)


def _examples(pair: tuple[Any, Any], card: ArrayCard, client: Any, times: Any) -> tuple[LabelledExamples, tuple[str, ...]]:
    x, casts = as_inputs(array_of(pair[0], "x"), card.vocabulary)
    labelled = as_targets(array_of(pair[1], "y"), card)
    ids = None if client is None else as_ids(client, len(x))
    return LabelledExamples(x, labelled, ids, None if times is None else as_times(times, len(x))), (*casts, *labelled.casts)


def array_info(card: ArrayCard, shape: tuple[int, ...], labelled: Labelled, picture: bool = True) -> Info:
    """Return the public facts about arrays of `shape` for each example; sizes are 0.

    Args:
        picture: inputs are bytes from 0 to 255.

    Raises:
        ConfigError: the card names another number of features, or has constants for another number of channels.
    """
    if card.features and shape != (len(card.features),):
        raise ConfigError(f"features names {len(card.features)} inputs, and x has {shape} for each example: name each once")
    middle, spread, scale = (0.5, 0.5, 255.0) if picture else (0.0, 1.0, 1.0)
    channels = 0 if card.vocabulary else shape[0]
    mean = _each("mean", middle if card.mean is None else card.mean, channels)
    std = _each("std", spread if card.std is None else card.std, channels)
    info = Info(card.name, "", shape, labelled.classes, 0, 0, 0, "data of one's own", False, mean, std, card.scale or scale)
    return replace(info, target=labelled.target, vocabulary=card.vocabulary, counted=labelled.counted)


def _each(key: str, value: float | tuple[float, ...], channels: int) -> tuple[float, ...]:
    values = value if isinstance(value, tuple) else (value,) * channels
    if len(values) != channels:
        raise ConfigError(
            f"{key} has {len(values)} numbers: give one, or one for each of the {channels} channels or features of x"
        )
    return values
