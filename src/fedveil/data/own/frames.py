"""Tables of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.dataset import Dataset
from fedveil.data.origin import Origin
from fedveil.data.own.cards import TableCard, checked_card
from fedveil.data.own.casts import Labelled, as_ids, as_targets, as_times
from fedveil.data.own.drawn_by_item import read_by_row
from fedveil.data.own.encoding import encoded, feature_layout, no_missing, odd_numbers, same_length
from fedveil.data.own.examples import OWN_TEST, LabelledExamples, divided, rule_text, separate
from fedveil.data.own.frame_columns import column_of, names_of, refuse_unknown
from fedveil.data.own.own_split import SplitRule
from fedveil.errors import DataError


def from_frame(
    df: Any, *, target: str | list[str], client: str | None = None, features: Any = None, test: Any = None, **public: Any
) -> Dataset:
    """A data set of a DataFrame of pandas or polars, a table of pyarrow, or a dict of arrays.

    Args:
        target: the column to learn, or several of them. client: the column that says whose row it is; they are the clients,
            unless the configuration has a partition. features: columns, in this order; left out, all others.
        test: which rows are for testing (see `own_split`; `latest` is the name of a column), or a table of their own.
            Left out, a fifth of the clients.
        public: what is public: name, classes, unit, categories, missing, normalise, split_seed (see `TableCard`).

    Raises:
        DataError: a column that cannot be learned from as it is; the message says what to do.
        ConfigError: an impossible argument.
    """
    own_test = read_by_row(test) if hasattr(test, "columns") or hasattr(test, "column_names") else None
    rule, table = None if own_test is not None else test, read_by_row(df)
    names_of(table)  # before what the arguments say of them
    chosen = {} if features is None else {"features": features}
    card = checked_card(TableCard, target=target, client=client, test=rule, **chosen, **public)
    library = type(df).__module__.partition(".")[0]
    return of_table(table, card, own_test, f"a table of {library}" if library != "builtins" else "a dict of columns")


def of_table(table: Any, card: TableCard, own_test: Any, source: str) -> Dataset:
    """As `from_frame`, with all that it needs on the card."""
    rule = card.test
    latest = rule.latest if rule is not None else None
    used = {*card.targets, *(name for name in (card.client, latest) if name is not None)}
    columns = names_of(table)
    for name in sorted(used):  # else the column that was meant would be taken for a feature
        refuse_unknown(name, columns)
    features = card.features or tuple(name for name in columns if name not in used)
    if not features:
        raise DataError("there are no features: give features=[...], the columns to learn from")
    if both := [name for name in features if name in (*card.targets, card.client)]:
        raise DataError(
            f"the column {both[0]!r} is a feature and the {'client' if both[0] == card.client else 'target'}: choose one"
        )
    examples, casts = examples_of(table, card, features, rule)
    info = table_info(card, features, examples.labelled)
    text = rule_text(rule, card.client is not None) if own_test is None else OWN_TEST
    names = feature_layout(card, features).names
    origin = Origin(source, text, names, casts, card.categories, card.missing, examples.labelled.counted)
    if own_test is None:
        return divided(examples, rule, card.split_seed, info, origin)
    fixed = card.model_copy(update={"classes": card.classes or examples.labelled.classes, "client": None})
    return separate(examples, examples_of(own_test, fixed, features)[0], info, origin)


def table_info(card: TableCard, features: tuple[str, ...], labelled: Labelled) -> Info:
    """What is public about a table; sizes are 0."""
    layout = feature_layout(card, features)
    shape = (len(layout.names),)
    info = Info(card.name, "", shape, labelled.classes, 0, 0, 0, "data of one's own", False, layout.mean, layout.std, 1.0)
    return replace(info, target=labelled.target, counted=labelled.counted)


def examples_of(
    table: Any, card: TableCard, features: tuple[str, ...], rule: SplitRule | None = None
) -> tuple[LabelledExamples, tuple[str, ...]]:
    """All rows of a table, with the times that the rule of the test split goes by, and the casts that this took.

    Raises:
        DataError: as `from_frame`.
    """
    x, casts = encoded(table, card, features)
    labelled = _targets(table, card)
    ids = times = None
    if card.client is not None:
        column = no_missing(column_of(table, card.client), "client")
        ids = as_ids(column.values, len(x), f"column {card.client!r} (the client)")
    if rule is not None and rule.latest is not None:
        column = no_missing(column_of(table, rule.latest), "time of the test split")
        times = as_times(column.values, len(x), f"column {rule.latest!r}")
    return LabelledExamples(x, labelled, ids, times), (*casts, *labelled.casts)


def _targets(table: Any, card: TableCard) -> Labelled:
    columns = [no_missing(column_of(table, name), "target") for name in card.targets]
    same_length(columns)
    for column in columns:
        if column.kind not in ("number", "text"):
            raise DataError(
                f"column {column.name!r} (the target) holds {column.stored}: give numbers, or text with classes=[...]"
            )
        if column.kind == "text" and not isinstance(card.classes, tuple) and (odd := odd_numbers(column)):
            raise DataError(f"column {column.name!r} (the target) {odd}these rows out; labels that are names need classes=[...]")
    if isinstance(card.target, str):
        return as_targets(columns[0].values, card, (card.target,), f"column {card.target!r} (the target)")
    y = np.stack([column.values for column in columns], axis=1)
    if y.dtype.kind == "b" and card.classes is None:  # a yes or no in each column, and not one class for each place
        card = card.model_copy(update={"classes": 0})
    return as_targets(y, card, card.targets, f"columns {', '.join(card.targets)} (the targets)")
