"""Answers that no honest machine sends, in Flower's own objects: each is an error of its sender, and the others are read."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fedveil.flower.flower_messages import content_of, record
from fedveil.network.careful_grid import CarefulGrid

pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")


class Stored:
    """A SuperLink's connection with answers to the messages 0, 1, ...: what was sent, unread."""

    def __init__(self, answers: list[Any]) -> None:
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        self.answers, self.contents = answers, {}
        self.trees = [get_object_tree(answer) for answer in answers]
        for answer in answers:
            self.contents.update({name: part.deflate() for name, part in get_all_nested_objects(answer).items()})

    def PullMessages(self, request: Any) -> Any:
        from flwr.proto.message_pb2 import Message, Metadata
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse

        def envelope(number: int, answer: Any) -> Any:
            return Message(metadata=Metadata(message_id=answer.object_id, reply_to_message_id=str(number), run_id=1))

        there = [envelope(i, answer) for i, answer in enumerate(self.answers) if str(i) in request.message_ids]
        return PullAppMessagesResponse(messages_list=there, message_object_trees=self.trees)

    def PullObject(self, request: Any) -> Any:
        return SimpleNamespace(
            object_found=True, object_available=True, object_content=self.contents[request.object_id], object_id=request.object_id
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
    answers = CarefulGrid(grid).pull_messages(["0", "1", "2"])
    assert [answer.metadata.reply_to_message_id for answer in answers] == ["0", "1", "2"]
    assert [content_of(answers[i]) for i in (0, 2)] == [b"first", b"last"]
    assert f"an answer that cannot be read ({said})" in content_of(answers[1])  # type: ignore[operator]
    assert grid._client is stored


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
        CarefulGrid(grid).pull_messages(["0"])
