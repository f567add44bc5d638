"""What a connection that fails does to the process that waits for tasks: nothing."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from fedveil.flower.wire_format import WireError
from fedveil.network.flower_api import Endpoint, TaskQueue, _heart, _retries
from fedveil.network.join import _answer

pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")


class Unauthorized(Exception):
    response = SimpleNamespace(status_code=401)


class Refusing:
    """A connection whose requests are not authorised, once."""

    def __init__(self) -> None:
        self.asked = 0

    def AcquireTask(self, request: Any) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise Unauthorized("401\nmore")
        return SimpleNamespace(HasField=lambda name: True, token="t", task=SimpleNamespace(run_id=3))


def test_a_request_that_is_refused_is_made_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Endpoint, "client", lambda self, *interceptors: Refusing())
    queue = TaskQueue(Endpoint("127.0.0.1:1", None, b"s"), "flwr-clientapp")
    assert queue.take() is None
    assert "tasks cannot be asked for now: 401" in caplog.text
    assert queue.take() == "t"


def test_a_token_that_is_no_longer_known_does_not_end_our_process() -> None:
    invoker, asked = _retries(), []
    invoker.recoverable_exceptions = (Unauthorized,)

    def ask() -> None:
        asked.append(1)
        raise Unauthorized("401")

    with pytest.raises(Unauthorized):  # and no SIGINT, which would end the test run
        invoker.invoke(ask)
    assert asked == [1]


@pytest.mark.parametrize("known", [True, False])
def test_a_task_that_flower_has_given_up_does_not_end_our_process(known: bool) -> None:
    """Flower's own heartbeat sends this process SIGINT, so that a client whose heartbeat was late ended without a reason."""
    beats: list[int] = []

    class Runtime:
        def SendTaskHeartbeat(self, request: Any) -> Any:
            beats.append(1)
            if not known:
                raise Unauthorized("401")
            return SimpleNamespace(success=False)

    heart = _heart(Runtime())
    heart.start()
    end = time.monotonic() + 10
    while len(beats) < (1 if known else 2) and time.monotonic() < end:
        time.sleep(0.01)
    heart.stop()
    assert len(beats) >= (1 if known else 2)


def test_a_message_that_fails_does_not_end_the_client(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def answer(self, parts: list[bytes]) -> bytes:
            raise OSError("No space left on device: alice.csv")

    answer: Future[bytes] = Future()
    _answer(Failing(), [b""], answer)  # type: ignore[arg-type]
    with pytest.raises(WireError, match="an error at the client, which its own log describes"):
        answer.result(0)
    assert "alice.csv" in caplog.text
