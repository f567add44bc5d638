"""The roster: its file, its digest, and what is no roster."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from fedveil.errors import ConfigError
from fedveil.secure_aggregation.roster import Roster, RosterClient
from masked_clients import roster_of, signing_key


def test_the_file_of_a_roster_holds_its_clients() -> None:
    roster = roster_of([0, 2, 7])
    odd = replace(roster.clients[1], name='Klinikum "Süd" \\ 日本\n\U000e0041')
    roster = Roster((roster.clients[0], odd, roster.clients[2]))
    assert tomllib.loads(roster.text) == {
        "client": [{"number": c.number, "name": c.name, "key": c.key.hex()} for c in roster.clients]
    }
    assert roster.digest.hex() in roster.text


def test_the_digest_covers_number_name_and_key_of_each_client() -> None:
    roster = roster_of([0, 1, 2])
    others = [
        Roster(roster.clients[:2]),
        Roster((*roster.clients[:2], replace(roster.clients[2], number=3))),
        Roster((*roster.clients[:2], replace(roster.clients[2], name="Hospital 3"))),
        Roster((*roster.clients[:2], replace(roster.clients[2], key=bytes(32)))),
    ]
    assert len({roster.digest, *(other.digest for other in others)}) == 5


@pytest.mark.parametrize(
    ("clients", "reason"),
    [
        ((), "numbered from 0"),
        ((RosterClient(1, "a", bytes(32)), RosterClient(0, "b", b"\1" * 32)), "ascend"),
        ((RosterClient(0, "a", bytes(32)), RosterClient(0, "b", b"\1" * 32)), "each number once"),
        ((RosterClient(-1, "a", bytes(32)),), "numbered from 0"),
        ((RosterClient(0, "a", bytes(32)), RosterClient(1, "b", bytes(32))), "the same key"),
        ((RosterClient(0, "a", bytes(32)), RosterClient(1, "a", b"\1" * 32)), "the same name"),
        ((RosterClient(0, "a", bytes(31)),), "a key of 32 bytes"),
        ((RosterClient(0, "", bytes(32)),), "need a name"),
    ],
)
def test_what_is_no_roster(clients: tuple[RosterClient, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Roster(clients)


def test_only_the_client_of_the_roster_signs_for_it() -> None:
    roster = roster_of([0, 1])
    signature = signing_key(0).sign(b"content")
    assert roster.signed(0, signature, b"content")
    assert not roster.signed(0, signature, b"contents")
    assert not roster.signed(1, signature, b"content")
    assert not roster.signed(5, signature, b"content")
    assert not roster.signed(0, b"", b"content")
