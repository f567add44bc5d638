"""Answers that no honest machine sends, in Flower's own objects: each is an error of its sender, and the others are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fedveil.deploy.strict_grid import LastingGrid, RunLost, StrictGrid
from fedveil.deploy.wire_format import content_of, record

pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")


class Stored:
    """A SuperLink's connection with answers to the messages 0, 1, ...: what was sent, unread."""

    def __init__(self, answers: list[Any], missing: int = 0) -> None:
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        self.answers, self.contents, self.missing, self.told = answers, {}, missing, set[str]()
        self.asked = list[str]()
        self.trees = [get_object_tree(answer) for answer in answers]
        for answer in answers:
            self.contents.update({name: part.deflate() for name, part in get_all_nested_objects(answer).items()})

    def PullMessages(self, request: Any) -> Any:
        from flwr.proto.message_pb2 import Message, Metadata
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse

        def envelope(number: int, answer: Any) -> Any:
            return Message(metadata=Metadata(message_id=answer.object_id, reply_to_message_id=str(number), run_id=1))

        new = [i for i in range(len(self.answers)) if str(i) in request.message_ids and str(i) not in self.told]
        self.told |= {str(i) for i in new}  # each is handed over once
        return PullAppMessagesResponse(
            messages_list=[envelope(i, self.answers[i]) for i in new], message_object_trees=[self.trees[i] for i in new]
        )

    def PullObject(self, request: Any) -> Any:
        """The last `missing` parts have not come yet."""
        name, there = request.object_id, list(self.contents)[: len(self.contents) - self.missing]
        self.asked += [name] * (name in there)
        return SimpleNamespace(
            object_found=True, object_available=name in there, object_content=self.contents[name], object_id=name
        )

    def ConfirmMessageReceived(self, request: Any) -> Any:
        return None


def message(content: Any, reply_to: int) -> Any:
    from flwr.app import Metadata
    from flwr.app.message import make_message

    return make_message(metadata=Metadata(1, "", 1, 1, str(reply_to), "", 0.0, 1.0, "train"), content=content)


def unreadable() -> Any:
    from flwr.app import ArrayRecord, RecordDict

    class Damaged(ArrayRecord):
        def deflate(self) -> bytes:
            return b"ArrayRecord  5\x00{{{{{"

    return message(RecordDict({"fedveil": Damaged()}), 1)


HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "an object that cannot be read": (unreadable, "JSONDecodeError"),
    "no message": (lambda: record([b"x"]), "AttributeError"),
    "an answer in another's place": (lambda: message(record([b"forged"]), 0), "it names another message"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_answer_that_cannot_be_read_costs_its_sender_alone(name: str) -> None:
    from flwr.superlink.grid import HttpGrid

    made, said = HOSTILE[name]
    grid = HttpGrid("127.0.0.1:1", True, None, token="t")
    grid._run = SimpleNamespace(run_id=1)  # type: ignore[assignment]
    stored: Any = Stored([message(record([b"first"]), 0), made(), message(record([b"last"]), 2)])
    grid._client = stored
    answers = StrictGrid(grid).pull_messages(["0", "1", "2"])
    assert [answer.metadata.reply_to_message_id for answer in answers] == ["0", "1", "2"]
    assert [content_of(answers[i]) for i in (0, 2)] == [b"first", b"last"]
    assert f"an answer that cannot be read ({said})" in content_of(answers[1])  # type: ignore[operator]
    assert grid._client is stored


def test_an_answer_of_which_a_part_is_missing_is_waited_for_by_whoever_asks_and_keeps_no_other_up() -> None:
    """Flower waited for the rest itself, up to two hours, whatever the server's own limit was."""
    from flwr.superlink.grid import HttpGrid

    grid = HttpGrid("127.0.0.1:1", True, None, token="t")
    grid._run = SimpleNamespace(run_id=1)  # type: ignore[assignment]
    stored: Any = Stored([message(record([b"first"]), 0), message(record([b"cut off"]), 1)], missing=1)
    grid._client, careful, begin = stored, StrictGrid(grid), time.monotonic()
    (first,) = careful.pull_messages(["0", "1"])
    assert content_of(first) == b"first"
    assert careful.pull_messages(["1"]) == []
    assert time.monotonic() - begin < 5
    stored.missing = 0
    (late,) = careful.pull_messages(["1"])
    assert content_of(late) == b"cut off"
    assert len(stored.asked) == len(set(stored.asked)), "no part comes twice"
    assert careful.pull_messages(["0", "1"]) == []


def test_a_connection_that_fails_is_no_answer() -> None:
    import httpx
    from flwr.superlink.grid import HttpGrid

    class Broken(Stored):
        def PullObject(self, request: Any) -> Any:
            raise httpx.ConnectError("gone")

    grid = HttpGrid("127.0.0.1:1", True, None, token="t")
    grid._run = SimpleNamespace(run_id=1)  # type: ignore[assignment]
    grid._client = Broken([message(record([b"first"]), 0)])  # type: ignore[assignment]
    with pytest.raises(httpx.ConnectError):
        StrictGrid(grid).pull_messages(["0"])


# --- a SuperLink that was started again -------------------------------------------------------------------------------


class Link:
    """A SuperLink whose runs may be lost; messages are answered by their own text."""

    def __init__(self) -> None:
        self.runs, self.lost, self.closed, self.sent = 0, False, list[int](), dict[str, str]()

    @contextmanager
    def begin(self) -> Iterator[Any]:
        self.runs += 1
        self.lost, self.sent, number = False, {}, self.runs
        yield self
        self.closed.append(number)

    def _check(self) -> None:
        if self.lost:
            raise RunLost

    def get_nodes(self) -> list[int]:
        self._check()
        return [1, 2]

    def push_messages(self, messages: Iterable[str]) -> list[str]:
        self._check()
        names = [f"run-{self.runs}-{text}" for text in messages]
        self.sent.update(zip(names, messages, strict=True))
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        self._check()
        assert set(names) <= set(self.sent)
        return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=n), text=self.sent.pop(n)) for n in names]


def codes(answers: Iterable[Any]) -> dict[str, Any]:
    return {answer.metadata.reply_to_message_id: getattr(getattr(answer, "error", None), "code", 0) for answer in answers}


@pytest.mark.parametrize("noticed", ["nodes", "push", "pull"])
def test_what_was_under_way_in_a_run_that_was_lost_is_answered_as_lost_and_the_next_one_goes_on(noticed: str) -> None:
    link, lines = Link(), list[str]()
    with LastingGrid(link.begin, lines.append) as grid:
        first = grid.push_messages(["a", "b"])
        link.lost = True
        if noticed == "nodes":
            assert list(grid.get_nodes()) == []
        elif noticed == "push":
            second = grid.push_messages(["c"])
            assert codes(grid.pull_messages(second)) == {second[0]: 5}
        assert codes(grid.pull_messages(first)) == dict.fromkeys(first, 5)
        assert (link.runs, link.closed) == (2, [1])
        again = grid.push_messages(["a"])
        assert codes(grid.pull_messages([*again, *first])) == {**dict.fromkeys(first, 5), again[0]: 0}
        assert list(grid.get_nodes()) == [1, 2]
    assert link.closed == [1, 2]
    assert len(lines) == 1


@pytest.mark.parametrize(("status", "lost"), [(401, True), (500, False)])
def test_a_superlink_that_does_not_know_a_run_says_so_by_401(status: int, lost: bool) -> None:
    import httpx

    from fedveil.deploy.flower_api import _lost

    def fail(*_: Any) -> Any:
        request = httpx.Request("POST", "http://x")
        raise httpx.HTTPStatusError("x", request=request, response=httpx.Response(status, request=request))

    grid = StrictGrid(
        SimpleNamespace(get_nodes=fail, push_messages=fail, _runtime_client=SimpleNamespace(PullMessages=fail)), _lost
    )
    for ask in (grid.get_nodes, lambda: grid.push_messages([]), lambda: grid.pull_messages([])):
        with pytest.raises(RunLost if lost else httpx.HTTPStatusError):
            ask()
