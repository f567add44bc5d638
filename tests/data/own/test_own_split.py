"""Who is for testing: rules, shares, and that nobody's presence, and no order of rows, changes anybody else's split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.data.own.cards import FORMS, SplitRule, held_out, owners_of, rule_of
from fedveil.errors import ConfigError, DataError

RULES = [{"share": 0.3}, {"clients": 0.5}, {"latest": "t", "share": 0.3}, {"latest": "t", "since": 5}]
people = st.lists(st.integers(0, 12), min_size=1, max_size=60)


def split(ids: list[Any], rule: Any, seed: int = 0, times: Any = None) -> np.ndarray:
    parsed = rule_of(rule)
    assert parsed is not None
    by = None if parsed.latest is None else np.asarray(times)
    return held_out(parsed, seed, owners_of(np.array(ids), len(ids)), by)


def whole(ids: list[Any], rule: Any, times: Any = None) -> np.ndarray | None:
    """None where nothing or all is held out."""
    try:
        return split(ids, rule, times=times)
    except DataError:
        return None


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(max_examples=150, deadline=None)
@given(ids=people, leaver=st.integers(0, 12))
def test_a_client_who_leaves_changes_nobody_elses_split(rule: Any, ids: list[int], leaver: int) -> None:
    times = np.arange(len(ids)) % 9
    others = np.array(ids) != leaver
    before, after = whole(ids, rule, times), whole([i for i in ids if i != leaver], rule, times[others]) if others.any() else None
    if before is not None and after is not None:
        assert before[others].tolist() == after.tolist()


@settings(max_examples=100, deadline=None)
@given(ids=people, order=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter_for_who_is_whose_client_and_for_whole_clients(ids: list[int], order: Any) -> None:
    shuffled = list(range(len(ids)))
    order.shuffle(shuffled)
    moved = [ids[i] for i in shuffled]
    assert owners_of(np.array(ids), len(ids)).codes[shuffled].tolist() == owners_of(np.array(moved), len(ids)).codes.tolist()
    one, other = whole(ids, {"clients": 0.5}), whole(moved, {"clients": 0.5})
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one[shuffled].tolist() == other.tolist()


@settings(max_examples=50, deadline=None)
@given(ids=people, at=st.integers(0, 59))
def test_what_a_record_holds_decides_nothing_but_by_its_own_time(ids: list[int], at: int) -> None:
    at %= len(ids)
    times = np.arange(len(ids)) % 9
    other = times.copy()
    other[at] = 100
    before, after = whole(ids, RULES[3], times), whole(ids, RULES[3], other)
    if before is not None and after is not None:
        assert np.delete(before, at).tolist() == np.delete(after, at).tolist()


def test_a_share_is_of_each_client_rounded_and_all_but_one_at_most() -> None:
    ids = ["a"] * 10 + ["b"] * 1 + ["c"] * 2 + ["d"] * 4
    test = split(ids, 0.3)
    counts = {one: int(test[np.array(ids) == one].sum()) for one in "abcd"}
    assert counts == {"a": 3, "b": 0, "c": 1, "d": 1}
    assert split(["a"] * 4, {"share": 0.9}).sum() == 3


def test_a_share_of_each_client_is_drawn_and_differs_by_client_and_seed() -> None:
    ids = np.repeat(np.arange(200), 10)
    drawn = split(ids.tolist(), 0.3).reshape(200, 10)
    assert (drawn.sum(1) == 3).all()
    assert len({tuple(row) for row in drawn}) > 80  # of 120 possible ones
    assert (np.abs(drawn.mean(0) - 0.3) < 0.12).all()  # 3.7 standard errors
    assert (split(ids.tolist(), 0.3, seed=1).reshape(200, 10) != drawn).any()
    assert (split(ids.tolist(), 0.3).reshape(200, 10) == drawn).all()


def test_whole_clients_are_held_out_in_about_their_share() -> None:
    ids = np.repeat(np.arange(3000), 2)
    test = split(ids.tolist(), {"clients": 0.2}).reshape(3000, 2)
    assert (test[:, 0] == test[:, 1]).all()
    assert abs(test[:, 0].mean() - 0.2) < 0.03  # 4 standard errors


def test_the_split_of_a_client_is_this_one() -> None:
    """So that a later version splits data as this one did."""
    assert split(["a"] * 6 + ["b"] * 6, 0.34).nonzero()[0].tolist() == [1, 3, 10, 11]
    assert split([*"abcdefgh"], {"clients": 0.5}).tolist() == [True, True, True, True, True, False, True, False]


def test_integers_and_their_text_are_one_client() -> None:
    numbers, texts = [1, 1, 2, 3, 10], ["1", "1", "2", "3", "10"]
    assert split(numbers, {"clients": 0.5}).tolist() == split(texts, {"clients": 0.5}).tolist()
    codes = [owners_of(np.array(ids), 5).codes.tolist() for ids in (numbers, texts)]
    assert codes == [[0, 0, 2, 3, 1]] * 2


def test_the_last_ones_of_each_client_by_time() -> None:
    ids, times = ["a", "a", "b", "a", "b", "b"], [3, 1, 9, 2, 7, 8]
    assert split(ids, {"latest": "t", "share": 0.34}, times=times).tolist() == [True, False, True, False, False, False]


def test_all_from_a_public_date_on() -> None:
    times = np.array(["2024-06-30", "2024-07-01", "2025-01-01"], dtype="datetime64[D]")
    assert split(["a", "a", "b"], {"latest": "t", "since": "2024-07-01"}, times=times).tolist() == [False, True, True]
    with pytest.raises(ConfigError, match="since = 'soon' cannot be compared with the times: give a date, such as '2024-07-01'"):
        split(["a", "b"], {"latest": "t", "since": "soon"}, times=times[:2])
    with pytest.raises(ConfigError, match="since = 'soon' cannot be compared with the times: give a number"):
        split(["a", "b"], {"latest": "t", "since": "soon"}, times=[1.0, 2.0])


def test_without_clients_the_share_is_of_all() -> None:
    assert held_out(SplitRule(share=0.25), 0, owners_of(None, 8)).sum() == 2


@pytest.mark.parametrize(
    ("ids", "rule", "wanted"),
    [
        (
            ["a", "b"],
            {"share": 0.2},
            "a random 0.2 of each client's examples) leaves no test examples of 2 examples of 2 clients",
        ),
        (
            ["a"],
            {"clients": 0.001},
            "whole clients, each with probability 0.001) leaves no test examples of 1 examples of 1 clients",
        ),
        (
            ["a"],
            {"clients": 0.999},
            "leaves nothing to train on of 1 examples of 1 clients: take another share, another split_seed",
        ),
    ],
)
def test_a_split_without_one_side_is_refused(ids: list[str], rule: Any, wanted: str) -> None:
    with pytest.raises(DataError) as caught:
        split(ids, rule)
    assert wanted in str(caught.value)


@pytest.mark.parametrize("test", [True, "some", {"client": 0.2}, {"latest": "t"}, {"share": 0.2, "clients": 0.1}, [0.2]])
def test_a_rule_of_another_form_is_refused(test: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        rule_of(test)
    assert str(caught.value) == f"test = {test!r}: give {FORMS}"


@pytest.mark.parametrize("test", [0.0, 1.0, -0.5, 2, float("nan"), {"clients": 1.5}])
def test_a_share_lies_between_0_and_1(test: Any) -> None:
    with pytest.raises(ConfigError, match="a share lies between 0 and 1"):
        rule_of(test)


def test_rules_in_words() -> None:
    found = [rule.text() for keys in RULES if (rule := rule_of(keys))]
    assert found == [
        "a random 0.3 of each client's examples",
        "whole clients, each with probability 0.5",
        "the last 0.3 of each client's examples by t",
        "all examples from 5 on by t",
    ]
    assert SplitRule(share=0.2).text(owned=False) == "a random 0.2 of the examples"
    assert [bool(rule and rule.ranked) for rule in map(rule_of, RULES)] == [False, False, True, False]
