"""Wrappers of Flower's grid: unreadable answers become errors of their senders, and a restarted SuperLink is tolerated.

Flower's own grid reads all answers at once, and raises if one of them is not a message; the others, and the run, are then lost.
Answers are stored unread, so any admitted client could end a run with a few bytes. Flower's grid also waits up to two hours for
the rest of an answer that has partly arrived; here such an answer counts as not yet arrived.

A SuperLink has its whole state in memory. After a restart a new run of Flower is started there. Messages that were in transit are
reported as lost, like those of a machine that is gone, and are sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

_log = logging.getLogger(__name__)


class RunLost(Exception):
    """Raised if the SuperLink does not know the run, because it was restarted."""


class _NotYet(Exception):
    """Raised if a part of an answer has not arrived yet."""


class StrictGrid:
    """Grid that reads answers one by one, each when all of it has arrived.

    Args:
        lost: whether an error means that the SuperLink does not know the run; RunLost is then raised.
    """

    def __init__(self, grid: Any, lost: Callable[[BaseException], bool] = lambda problem: False) -> None:
        self.grid, self._lost = grid, lost
        self._coming = dict[str, tuple[Any, Any, _CachedParts]]()

    def get_nodes(self) -> Iterable[Any]:
        """Return the nodes, as Flower's grid does."""
        with self._run_checked():
            nodes: Iterable[Any] = self.grid.get_nodes()
            return nodes

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        """Send messages, as Flower's grid does."""
        with self._run_checked():
            pushed: Iterable[str] = self.grid.push_messages(messages)
            return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """Return answers as Flower's grid does, with an error for each that cannot be read or that names another message.

        Flower announces an answer only once, when it begins to arrive: its parts are cached until the last one is there, or until
        nobody asks for it.
        """
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        asked, client = set(message_ids), self.grid._runtime_client
        self._coming = {name: one for name, one in self._coming.items() if name in asked}
        with self._run_checked():
            pulled = client.PullMessages(PullAppMessagesRequest(message_ids=asked - self._coming.keys()))
            for proto, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
                self._coming[proto.metadata.reply_to_message_id] = (proto, tree, _CachedParts(client))
            return [answer for name in list(self._coming) if (answer := self._read(name)) is not None]

    @contextmanager
    def _run_checked(self) -> Iterator[None]:
        try:
            yield
        except BaseException as problem:
            if self._lost(problem):
                raise RunLost from problem
            raise

    def _read(self, asked: str) -> Any:
        """Return the answer to that message, or None if it has not fully arrived."""
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
        except httpx.HTTPError:  # a connection error
            raise
        except Exception as raised:  # caused by the answer's bytes
            problem = type(raised).__name__
            _log.info("an answer that cannot be read: %s", raised)
        finally:
            self.grid._client = client
        return _failed(asked, Error(ErrorCode.MESSAGE_UNAVAILABLE, f"an answer that cannot be read ({problem})"))


def _failed(asked: str, error: Any) -> Any:
    """Return an error answer that contains nothing that was sent."""
    return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=asked), error=error, has_error=lambda: True)


class LastingGrid:
    """Grid that is replaced by a new one if the SuperLink has lost it.

    Args:
        begin: makes a grid, which raises RunLost when it is lost; the old one is closed before. tell: called with a line then.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Any]], tell: Callable[[str], None]) -> None:
        self._begin, self._tell, self._stack = begin, tell, ExitStack()
        self._grid, self._sent = self._stack.enter_context(begin()), set[str]()

    def __enter__(self) -> LastingGrid:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def get_nodes(self) -> Iterable[Any]:
        """Return the nodes, as Flower's grid does."""
        try:
            return list(self._grid.get_nodes())
        except RunLost:
            self._anew()
            return []

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Send messages, as Flower's grid does; those that could not be sent are answered as lost."""
        given = list(messages)
        try:
            pushed = list(self._grid.push_messages(given))
        except RunLost:
            self._anew()
            return [f"lost-{number}" for number in range(len(given))]
        self._sent.update(pushed)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """Return answers, as Flower's grid does; a message of a lost run is answered like one whose node is gone."""
        from flwr.app import Error
        from flwr.common.constant import ErrorCode

        asked = list(message_ids)
        try:
            answers = list(self._grid.pull_messages([name for name in asked if name in self._sent]))
        except RunLost:
            self._anew()
            answers = []
        lost = Error(ErrorCode.NODE_UNAVAILABLE, "the SuperLink was started again")
        return [*answers, *(_failed(name, lost) for name in asked if name not in self._sent)]

    def _anew(self) -> None:
        self._tell("the SuperLink was started again: its clients are waited for, and asked again")
        self._stack.close()
        self._sent = set()
        self._grid = self._stack.enter_context(self._begin())


class _CachedParts:
    """Connection that already has the response to the next PullMessages, and caches the parts that have arrived."""

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
