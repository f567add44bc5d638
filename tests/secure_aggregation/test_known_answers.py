"""The bytes of secure aggregation: known answers, and a second implementation that was written from their description alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.secure_aggregation import member
from fedveil.secure_aggregation.encoding import (
    Terms,
    encode,
    masked_answer,
    ready_answer,
    round_digest,
    set_digest,
    set_request,
    signed_key,
    signed_vector,
)
from fedveil.secure_aggregation.masks import mask_key, masked, shared_secret, signed, unpacked
from fedveil.secure_aggregation.roster import Roster, RosterClient
from masked_clients import ROUND, TOLD, D, N, Played, signing_key, terms_of
from second_aggregation import SecondClient, opened, stream, x25519

KNOWN = json.loads((Path(__file__).parents[1] / "oracles/secure-aggregation-vectors.json").read_text())
PAIRS = [pytest.param(pair, id=f"{pair['bits']} bits") for pair in KNOWN["pairs"]]


def bytes_of(table: dict[str, str]) -> dict[int, bytes]:
    return {int(i): bytes.fromhex(value) for i, value in table.items()}


def known_terms(bits: int) -> Terms:
    roster = Roster(tuple(RosterClient(i, f"{i}", key) for i, key in bytes_of(KNOWN["roster"]).items()))
    bounds = KNOWN["least"], KNOWN["colluders"], KNOWN["attempts"], bits, KNOWN["count"]
    return Terms(KNOWN["run"], bytes.fromhex(KNOWN["offer"]), roster, *bounds)


def plan_of(pair: dict[str, Any], members: int) -> bytes:
    return next(bytes.fromhex(a["plan"]) for a in pair["attempts"] if len(a["members"]) == members)


def test_names_and_parts_have_one_form() -> None:
    name, *parts = KNOWN["enc_example"]["of"][:2]
    assert encode(name, *parts, b"ab").hex() == KNOWN["enc_example"]["is"]


@pytest.mark.parametrize("pair", PAIRS)
def test_digests_and_signatures_are_the_known_ones(pair: dict[str, Any]) -> None:
    terms = known_terms(pair["bits"])
    seen = round_digest(terms, KNOWN["round"], KNOWN["told"].encode(), plan_of(pair, KNOWN["least"]))
    assert (terms.digest.hex(), seen.hex()) == (pair["common"], pair["what"])
    keys, signatures = bytes_of(pair["keys"]), bytes_of(pair["key_signatures"])
    for i, key in keys.items():
        assert terms.roster.signed(i, signatures[i], signed_key(seen, i, key))
        assert not terms.roster.signed(i, signatures[i], signed_key(seen, i + 1, key))
    for attempt in pair["attempts"]:
        members = {i: (keys[i], signatures[i]) for i in attempt["members"]}
        of_set = set_digest(seen, attempt["attempt"], bytes.fromhex(attempt["plan"]), members)
        assert of_set.hex() == attempt["header"]
        for i, signature in bytes_of(attempt["masked_signatures"]).items():
            vector = bytes.fromhex(attempt["masked"][f"{i}"])
            assert terms.roster.signed(i, signature, signed_vector(of_set, i, vector))


@pytest.mark.parametrize("pair", PAIRS)
def test_masks_vectors_and_sums_are_the_known_ones(pair: dict[str, Any]) -> None:
    bits, count = pair["bits"], KNOWN["count"]
    for attempt in pair["attempts"]:
        keys = {tuple(map(int, name.split("-"))): bytes.fromhex(key) for name, key in attempt["mask_keys"].items()}
        assert stream(keys[0, 1], count, bits) == attempt["mask_0-1"]
        sums = []
        for i, inputs in attempt["inputs"].items():
            others = {j: keys[min(int(i), j), max(int(i), j)] for j in attempt["members"] if j != int(i)}
            vector = masked(np.array(inputs), others, int(i), bits)
            assert vector.hex() == attempt["masked"].get(i, vector.hex())
            sums.append(unpacked(vector, count, bits))
        if attempt["sum"] is not None:
            assert signed(np.sum(sums, axis=0, dtype=sums[0].dtype), bits).tolist() == attempt["sum"]
        pairs = [set(map(int, name.split("-"))) for name in attempt["mask_keys"]]
        assert len(pairs) == len(attempt["members"]) * (len(attempt["members"]) - 1) // 2


def test_mask_keys_come_from_the_pair_the_set_and_its_numbers() -> None:
    alice, bob = b"\x77" * 32, b"\x5d" * 32
    public = [x25519(key, (9).to_bytes(32, "little")) for key in (alice, bob)]
    secret = shared_secret(X25519PrivateKey.from_private_bytes(alice), public[1])
    assert secret == x25519(alice, public[1]) == x25519(bob, public[0])
    names = [(bytes(32), 0, 1), (bytes(32), 0, 2), (bytes(32), 1, 2), (b"\1" * 32, 0, 1)]
    assert len({mask_key(secret, *name) for name in names}) == 4


@pytest.mark.parametrize("bits", [8, 16, 24, 32, 40, 48, 56, 64])
def test_the_second_implementation_sends_the_same_bytes(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = terms_of(bits=bits)
    play, clients = Played(terms), range(N)
    bounds = terms.least, terms.colluders, terms.attempts, bits, D
    raw = {i: bytes([i + 1]) * 32 for i in clients}
    seconds = {
        i: SecondClient(i, raw[i], signing_key(i).private_bytes_raw(), terms.run, terms.offer, terms.roster.keys, bounds)
        for i in clients
    }
    answers, least = {}, play.releases[0].plan(terms.least)
    for i in clients:
        with monkeypatch.context() as patch:
            patch.setattr(
                member.X25519PrivateKey, "generate", staticmethod(lambda i=i: X25519PrivateKey.from_private_bytes(raw[i]))
            )
            answers[i] = play.members[i].ready(ROUND, TOLD, play.releases[i])
        assert answers[i] == seconds[i].ready(ROUND, TOLD, least)
    play.server.begin(ROUND, TOLD, play.releases[0])
    assert [play.server.ready(i, answers[i]) for i in clients] == [""] * N
    request = play.server.name_set()
    assert request is not None
    keys = {i: x25519(raw[i], (9).to_bytes(32, "little")) for i in clients}
    vectors = []
    for i in clients:
        answer = play.members[i].masked(request)
        drawn = play.releases[i].drawn[-1].tolist()
        assert answer == seconds[i].masked(1, play.releases[i].plan(N), keys, drawn)
        vectors.append(answer[14 : 14 + D * bits // 8])
        assert play.server.masked(i, answer) == ""
    total, plain = play.server.total(), play.plain_sum(clients).tolist()
    assert total is not None
    assert total.tolist() == opened(vectors, bits) == [(x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for x in plain]


def test_a_second_client_takes_part_among_others() -> None:
    play = Played()
    terms, own = play.terms, bytes(range(32))
    bounds = terms.least, terms.colluders, terms.attempts, terms.bits, D
    second = SecondClient(2, own, signing_key(2).private_bytes_raw(), terms.run, terms.offer, terms.roster.keys, bounds)
    server = play.begun([0, 1, 3, 4])
    assert server.ready(2, second.ready(ROUND, TOLD, play.releases[0].plan(terms.least))) == ""
    request = server.name_set()
    assert request is not None
    keys = {i: key for i, (key, _) in play.keys([0, 1, 3, 4]).items()} | {2: x25519(own, (9).to_bytes(32, "little"))}
    assert play.answered(request, [0, 1, 3, 4]) == [""] * 4
    vector = [5, -6, 7, 0, 2**18, -(2**18), 1]
    assert server.masked(2, second.masked(1, play.releases[0].plan(N), keys, vector)) == ""
    total = server.total()
    assert total is not None
    assert total.tolist() == (play.plain_sum([0, 1, 3, 4]) + vector).tolist()


def test_messages_of_another_form_are_refused() -> None:
    from fedveil.secure_aggregation.encoding import ProtocolError, read_masked, read_ready, read_set

    right = {
        read_ready: ready_answer(bytes(32), bytes(64)),
        read_set: set_request(1, {0: (bytes(32), bytes(64)), 3: (bytes(32), bytes(64))}),
        read_masked: masked_answer(b"abc", bytes(64)),
    }
    for read, message in right.items():
        read(message)
        wrong = [message[:-1], message + b"\0", b"", message[1:], *(m for m in right.values() if m != message)]
        wrong += [message[:k] + b"\xff\xff\xff\xff" + message[k + 4 :] for k in (0, 4, 9)]
        for other in wrong:
            with pytest.raises(ProtocolError):
                read(other)
    for numbers in ([3, 0], [0, 0]):
        parts = [part for i in numbers for part in (i, bytes(32), bytes(64))]
        with pytest.raises(ProtocolError, match="must ascend"):
            read_set(encode("set", 1, *parts))
