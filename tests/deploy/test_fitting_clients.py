"""An app that has come to answer with other arrays is told from failures, and from who was drawn."""

from __future__ import annotations

import pytest

from fedveil.deploy.central_dp import FittingClients

Replies = tuple[set[int], set[int], set[int]]

ROUNDS: dict[str, list[tuple[Replies, bool]]] = {
    "nobody from the beginning": [(({1, 2}, set(), {2}), True)],
    "everybody failed": [(({1, 2}, set(), set()), False), (({1, 2}, set(), {1, 2}), True)],
    "no more": [(({1, 2}, {1, 2}, set()), False), (({1, 2}, set(), {1, 2}), True)],
    "one that fitted fails": [(({1, 2}, {1, 2}, set()), False), (({1, 2}, set(), {2}), False), (({1, 2}, set(), {1}), True)],
    "fewer than those that fit": [(({1, 2}, {1, 2}, set()), False), (({3}, set(), {3}), False), (({4}, set(), {4}), True)],
    "both kinds in one round": [
        (({1, 2}, {1}, {2}), False),
        (({2, 3, 4}, set(), {2, 3, 4}), False),
        (({1}, set(), {1}), True),
    ],
    "nobody drawn": [((set(), set(), set()), False)],
}


@pytest.mark.parametrize("name", ROUNDS)
def test_the_app_has_changed_where_nobody_is_left_whose_reply_fits(name: str) -> None:
    clients = FittingClients()
    assert [clients.none_left(*replies) for replies, _ in ROUNDS[name]] == [ended for _, ended in ROUNDS[name]]
