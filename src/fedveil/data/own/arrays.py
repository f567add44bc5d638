"""Arrays and tensors of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.dataset import Dataset
from fedveil.data.origin import Origin
from fedveil.data.own.cards import ArrayCard, checked_card
from fedveil.data.own.casts import Labelled, array_of, as_ids, as_inputs, as_targets, as_times
from fedveil.data.own.examples import OWN_TEST, LabelledExamples, divided, rule_text, separate
from fedveil.errors import ConfigError


def from_arrays(x: Any, y: Any, *, client: Any = None, test: Any = None, **public: Any) -> Dataset:
    """A data set of arrays, tensors or lists, which `fv.train(config, data=...)` takes as it is.

    Args:
        x: (examples, ...): features, float or integer; pictures (examples, channels, height, width), uint8; tokens
            (examples, length), integers, with `vocabulary`. y: (examples, ...): classes, integer or bool, or text with `classes`;
            quantities, float.
        client: whose example it is, an integer or text each. These are the clients, unless the configuration has a partition.
        test: which examples are for testing (see `own_split`), or (x, y) of their own. Left out, a fifth of the clients.
        public: what is public: name, classes, unit, features, mean, std, scale, vocabulary, split_seed (see `ArrayCard`).

    Raises:
        DataError: values that no cast without loss makes right; the message says what to do. ConfigError: an impossible argument.
    """
    return of_arrays((x, y), client, test, public, "arrays")


def of_arrays(pair: tuple[Any, Any], client: Any, test: Any, public: dict[str, Any], source: str) -> Dataset:
    """As `from_arrays`, with the name of what the arrays were made from."""
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
    """What is public about arrays of `shape` for each example; sizes are 0.

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
