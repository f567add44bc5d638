"""Caps of a client on messages, time and memory, which hold whatever a server asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.deploy.consent import Limits
from fedveil.deploy.join import JoinedClient
from fedveil.deploy.offers import offer_bytes, offer_of, read_consent
from fedveil.deploy.wire_format import WireError
from fedveil.errors import ConfigError
from joined_clients import consent, machines, rows, served, small


def test_training_that_takes_too_long_counts_as_failed_and_is_released_as_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = small(training={"local_steps": 20_000, "rounds": 1})
    there = machines(tmp_path / "clients", limits={"round_seconds": 0.2})
    result, _ = served(slow, tmp_path / "server", there)
    assert result.history[0]["participants"] == 3
    assert "training took longer than the 0.2 seconds that this client allows" in caplog.text
    for number in range(3):
        (ledger,) = (tmp_path / f"clients/{number}/runs").glob("*/ledger.sqlite")
        assert len(rows(ledger)) == 1


def test_messages_beyond_the_limit_are_refused_before_and_during_a_run(tmp_path: Path) -> None:
    agreed = consent(0, limits={"message_bytes": 2**20})
    client = JoinedClient(tmp_path / "client", agreed)
    wide = offer_of("r", 0, small(model={"name": "mlp", "hidden": [4000]}))
    said = "model: one has 1,200,040 bytes, and limits.message_bytes is 1,048,576 of this client's consent"
    assert said in read_consent(client.answer([offer_bytes(wide)]), wide)
    with pytest.raises(WireError, match=r"at most 1048576 bytes at this client \(limits.message_bytes\)"):
        client.answer([bytes(2**20 + 1)])


def test_limits_that_are_too_small_for_anything_are_refused() -> None:
    for key in ("message_bytes", "memory_bytes", "round_seconds"):
        with pytest.raises((ConfigError, ValueError), match=key):
            Limits.model_validate({key: 0})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux limits a process's memory")
def test_a_client_gets_no_more_memory_than_its_consent_allows() -> None:
    program = (
        "from fedveil.deploy.programs import limit_memory; limit_memory(2**30); bytes(2**28); print('fits', flush=True);"
        "bytes(2**30)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "fits\n"
    assert "MemoryError" in done.stderr
