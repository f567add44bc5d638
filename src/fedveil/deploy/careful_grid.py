"""Flower's grid, but that an answer which cannot be read is an error of its sender alone, and that it outlives the SuperLink.

Flower's own grid takes all answers at once, and raises where one of them is no message; the others are lost then, and with them
the run. What a machine sends is stored unread, so that whoever was admitted could end a run by a few bytes. It also waits, up to
two hours, for the rest of an answer of which a part has come; here that answer is not there yet, as one of which nothing has.

A SuperLink has all that it knows in memory. When it is started again after it has ended, a new run of Flower is begun there, and
the messages that were under way are lost to their senders as those of a machine that is gone: they are sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

_log = logging.getLogger(__name__)


class RunLost(Exception):
    """The SuperLink does not know the run: it was started again."""


class _NotYet(Exception):
    """A part of an answer has not come yet."""


class CarefulGrid:
    """A grid of Flower, whose answers are read one by one, each when all of it is there.

    Args:
        lost: whether an error says that the SuperLink does not know the run; RunLost is raised then.
    """

    def __init__(self, grid: Any, lost: Callable[[BaseException], bool] = lambda problem: False) -> None:
        self.grid, self._lost = grid, lost
        self._coming = dict[str, tuple[Any, Any, _Handing]]()

    def get_nodes(self) -> Iterable[Any]:
        """As Flower's."""
        with self._known():
            nodes: Iterable[Any] = self.grid.get_nodes()
            return nodes

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        """As Flower's."""
        with self._known():
            pushed: Iterable[str] = self.grid.push_messages(messages)
            return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """As Flower's, with an error in the place of an answer that cannot be read, or that names another message than asked.

        Flower says once that an answer has begun to come: its parts are kept until the last one is there, or nobody asks for it.
        """
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        asked, client = set(message_ids), self.grid._runtime_client
        self._coming = {name: one for name, one in self._coming.items() if name in asked}
        with self._known():
            found = client.PullMessages(PullAppMessagesRequest(message_ids=asked - self._coming.keys()))
            for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                self._coming[proto.metadata.reply_to_message_id] = (proto, tree, _Handing(client))
            return [answer for name in list(self._coming) if (answer := self._read(name)) is not None]

    @contextmanager
    def _known(self) -> Iterator[None]:
        try:
            yield
        except BaseException as problem:
            if self._lost(problem):
                raise RunLost from problem
            raise

    def _read(self, asked: str) -> Any:
        """The answer to that message, or None where it is not all there."""
        import httpx
        from flwr.app import Error
        from flwr.common.constant import ErrorCode
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse

        (proto, tree, parts), client = self._coming.pop(asked), self.grid._runtime_client
        parts.answer = PullAppMessagesResponse(messages_list=[proto], message_object_trees=[tree])
        self.grid._client = parts
        try:
            (answer,) = self.grid.pull_messages([asked])
            if answer.metadata.reply_to_message_id == asked:
                return answer
            problem = "it names another message"
        except _NotYet:
            self._coming[asked] = (proto, tree, parts)
            return None
        except httpx.HTTPError:  # of the connection
            raise
        except Exception as raised:  # of whatever its bytes are
            problem = type(raised).__name__
            _log.info("an answer that cannot be read: %s", raised)
        finally:
            self.grid._client = client
        return _failed(asked, Error(ErrorCode.MESSAGE_UNAVAILABLE, f"an answer that cannot be read ({problem})"))


def _failed(asked: str, error: Any) -> Any:
    """An answer that is an error, made of nothing that was sent."""
    return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=asked), error=error, has_error=lambda: True)


class LastingGrid:
    """A grid that is begun anew where the SuperLink has lost it.

    Args:
        begin: makes a grid, which raises RunLost when it is lost; what it was is closed before. tell: called with a line then.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Any]], tell: Callable[[str], None]) -> None:
        self._begin, self._tell, self._stack = begin, tell, ExitStack()
        self._grid, self._sent = self._stack.enter_context(begin()), set[str]()

    def __enter__(self) -> LastingGrid:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def get_nodes(self) -> Iterable[Any]:
        """As Flower's."""
        try:
            return list(self._grid.get_nodes())
        except RunLost:
            self._anew()
            return []

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """As Flower's; what could not be sent is answered as lost."""
        given = list(messages)
        try:
            pushed = list(self._grid.push_messages(given))
        except RunLost:
            self._anew()
            return [f"lost-{number}" for number in range(len(given))]
        self._sent.update(pushed)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """As Flower's; a message of a run that was lost is answered as one whose node is gone."""
        from flwr.app import Error
        from flwr.common.constant import ErrorCode

        asked = list(message_ids)
        try:
            found = list(self._grid.pull_messages([name for name in asked if name in self._sent]))
        except RunLost:
            self._anew()
            found = []
        lost = Error(ErrorCode.NODE_UNAVAILABLE, "the SuperLink was started again")
        return [*found, *(_failed(name, lost) for name in asked if name not in self._sent)]

    def _anew(self) -> None:
        self._tell("the SuperLink was started again: its clients are waited for, and asked again")
        self._stack.close()
        self._sent = set()
        self._grid = self._stack.enter_context(self._begin())


class _Handing:
    """A connection that has already the answer to the next question for answers, and the parts that have come."""

    def __init__(self, client: Any) -> None:
        self._client, self._parts = client, dict[str, Any]()
        self.answer: Any = None

    def PullMessages(self, request: Any) -> Any:
        return self.answer

    def PullObject(self, request: Any) -> Any:
        if (part := self._parts.get(request.object_id)) is None:
            part = self._client.PullObject(request)
            if part.object_found and not part.object_available:
                raise _NotYet
            self._parts[request.object_id] = part
        return part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
