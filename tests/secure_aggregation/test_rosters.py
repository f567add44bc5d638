"""The roster: its file, its digest, and what is no roster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.errors import ConfigError
from fedveil.secure_aggregation.roster import Roster, RosterClient
from masked_clients import roster_of, signing_key


def test_a_roster_is_read_as_it_was_written(tmp_path: Path) -> None:
    roster = roster_of([0, 2, 7])
    odd = replace(roster.clients[1], name='Klinikum "Süd" \\ 日本\n\U000e0041')
    roster = Roster((roster.clients[0], odd, roster.clients[2]))
    (tmp_path / "roster.toml").write_text(roster.text, encoding="utf-8")
    assert Roster.read(tmp_path / "roster.toml") == roster
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


@pytest.mark.parametrize("text", ["", "client = 1", "[[client]]\nnumber = 0\nname = 'a'\nkey = 'zz'", "[[client]]\nnumber = 0"])
def test_a_file_that_is_no_roster(text: str, tmp_path: Path) -> None:
    (tmp_path / "roster.toml").write_text(text)
    with pytest.raises(ConfigError, match="is no roster"):
        Roster.read(tmp_path / "roster.toml")
    with pytest.raises(ConfigError, match="is no roster"):
        Roster.read(tmp_path / "elsewhere.toml")


def test_only_the_client_of_the_roster_signs_for_it() -> None:
    roster = roster_of([0, 1])
    signature = signing_key(0).sign(b"content")
    assert roster.signed(0, signature, b"content")
    assert not roster.signed(0, signature, b"contents")
    assert not roster.signed(1, signature, b"content")
    assert not roster.signed(5, signature, b"content")
    assert not roster.signed(0, b"", b"content")
