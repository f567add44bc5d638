"""How long a client judges an offer: no longer than its consent says, whatever the method needs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from federation_runs import config
from fedveil.deploy.join import JoinedClient
from fedveil.deploy.offers import offer_bytes, offer_of, read_consent
from fedveil.papers.aldp_fl.baselines import GFLALDPA
from joined_clients import consent

LIFETIME = {view: {"epsilon": 8.001, "delta": 0.01} for view in ("server", "aggregate")}


def judged(folder: Path, run: str, offered: Any, **limits: float) -> tuple[str, float]:
    """Why a client refuses, and after how many seconds."""
    client, offer = JoinedClient(folder, consent(0, least_noise=0.1, lifetime=LIFETIME, limits=limits)), offer_of(run, 0, offered)
    begin = time.monotonic()
    return read_consent(client.answer([offer_bytes(offer)]), offer), time.monotonic() - begin


def test_an_offer_that_takes_longer_to_certify_than_the_client_allows_is_refused_then_and_keeps_no_other_up(
    tmp_path: Path,
) -> None:
    """The limit was looked at where the certificate was there; one of 10,000 unequal rounds with samples takes minutes."""
    sampled = {"rounds": 10_000, "clients_per_round": 2, "sampling": "poisson"}
    slow, found = config({"name": "time-varying-dp"}, "aggregate", training=sampled), list[tuple[str, float]]()
    thread = threading.Thread(target=lambda: found.append(judged(tmp_path, "slow", slow, seconds=2)))
    thread.start()
    other, seconds = judged(tmp_path, "other", config({"name": "dp-fedavg"}, "server"))
    assert other == ""
    thread.join()
    ((why, took),) = found
    assert "judging the run takes longer than limits.seconds = 2 of this client's consent" in why
    assert 2 <= took < 4
    assert seconds < took
    assert list(tmp_path.rglob("offer.json")) == [*tmp_path.glob("runs/other/offer.json")]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gfl-aldpa", "time-varying-dp", "dpa-ldp"])
def test_ten_thousand_rounds_are_judged_in_the_time_that_a_consent_gives(name: str, tmp_path: Path) -> None:
    """The costs of all rounds were added up anew for each of them, or each of their plans made for each noise tried."""
    why, took = judged(tmp_path, "r", config({"name": name}, "server", training={"rounds": 10_000, "clients_per_round": 4}))
    assert "takes longer" not in why
    assert took < 30


def test_the_weights_of_rounds_are_what_their_formula_says() -> None:
    method = GFLALDPA(growth=1.5)
    for t in (0, 6, 20):
        assert method.weight(t, 21) == (t + 1) ** 1.5 * (21 / sum(s**3.0 for s in range(1, 22))) ** 0.5
