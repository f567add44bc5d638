"""What a connection that fails does to the process that waits for tasks: nothing."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import Future
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from fedveil.deploy import flower_api, join
from fedveil.deploy.flower_api import Endpoint, TaskQueue, _heartbeat, _retries, _RetryingClient, answer_message
from fedveil.deploy.join import _answer
from fedveil.deploy.wire_format import WireError

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


@pytest.mark.parametrize(
    ("kind", "words", "ends"),
    [
        ("ConnectTimeout", "_ssl.c:989: The handshake operation timed out", False),
        ("ConnectError", "CERTIFICATE_VERIFY_FAILED", True),
    ],
)
def test_a_late_handshake_is_made_again_and_a_foreign_certificate_is_not(kind: str, words: str, ends: bool) -> None:
    """With 50 clients on two cores the server ended by the first."""
    httpx = pytest.importorskip("httpx")
    assert _retries().should_giveup(getattr(httpx, kind)(words)) is ends


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

    heart = _heartbeat(Runtime())
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


def test_a_message_that_is_not_stored_yet_is_asked_for_again() -> None:
    """A SuperNode makes a task before it stores its message: taken in between, the client was lost (1 of 100 answers)."""
    stored: list[list[str]] = [[], [], ["message"]]

    class SuperNode:
        other = "as it is"

        def PullMessages(self, request: Any) -> Any:
            return SimpleNamespace(messages_list=stored.pop(0))

    patient = _RetryingClient(SuperNode())
    assert patient.PullMessages(None).messages_list == ["message"]
    assert not stored
    assert patient.other == "as it is"


def test_a_message_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_api, "_UNSTORED", 0.2)
    nothing = SimpleNamespace(messages_list=[])
    assert _RetryingClient(SimpleNamespace(PullMessages=lambda request: nothing)).PullMessages(None) is nothing


def test_a_supernode_whose_message_was_lost_is_ended_so_that_it_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the answer for ever otherwise, and takes part in no later round."""
    ended: list[bool] = []

    def lost(*_: Any) -> None:
        raise RuntimeError("No messages received from Runtime API")

    monkeypatch.setattr(join, "answer_message", lost)
    supernode = SimpleNamespace(terminate=lambda: ended.append(True))
    join._carry(Endpoint("127.0.0.1:1", None, b"s"), "token", "", Queue(), supernode, print)  # type: ignore[arg-type]
    assert ended == [True]


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [(b"ours", 0, ""), (b"theirs", 7, "a foreign app bundle, which is not run here"), (b"no run", 1, "not consented")],
)
def test_what_is_refused_is_told_on_both_sides_and_never_run(
    content: bytes, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.common.constant import ErrorCode
    from flwr.supernode.runtime import run_clientapp

    pushed: list[Any] = []
    message = SimpleNamespace(content="parts")
    fab = SimpleNamespace(content=b"theirs" if content == b"theirs" else b"ours")

    def answer(parts: list[bytes]) -> bytes:
        assert content != b"theirs"
        if content == b"no run":
            raise WireError("a round of run r, to which this client has not consented")
        return b"answer"

    monkeypatch.setattr(Endpoint, "client", lambda self, *interceptors: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(
        "fedveil.deploy.flower_api._heartbeat", lambda client: SimpleNamespace(start=lambda: None, stop=lambda: None)
    )
    monkeypatch.setattr("fedveil.deploy.flower_api.parts_of", lambda content: [b"part"])
    monkeypatch.setattr("flwr.app.Message", lambda body, reply_to: body)
    monkeypatch.setattr(run_clientapp, "pull_task_input", lambda client: (message, None, None, fab))
    monkeypatch.setattr(run_clientapp, "push_message", lambda client, reply, context: pushed.append(reply))
    monkeypatch.setattr(run_clientapp, "push_task_output", lambda client, context, status, details: pushed.append(details))
    reason = answer_message(Endpoint("127.0.0.1:1", None, b"s"), "t", hashlib.sha256(b"ours").hexdigest(), answer)
    assert said in reason
    assert bool(reason) == bool(said)
    reply, details = pushed
    assert details == ""
    if code:
        expected = ErrorCode.INVALID_FAB if code == 7 else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        assert (reply.code, reply.reason) == (expected, reason)
    else:
        assert not hasattr(reply, "code")
