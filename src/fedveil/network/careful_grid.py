"""Flower's grid, but that an answer which cannot be read is an error of its sender alone.

Flower's own grid takes all answers at once, and raises where one of them is no message; the others are lost then, and with them
the run. What a machine sends is stored unread, so that whoever was admitted could end a run by a few bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

_log = logging.getLogger(__name__)


class CarefulGrid:
    """A grid of Flower, whose answers are read one by one."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def get_nodes(self) -> Iterable[Any]:
        """As Flower's."""
        nodes: Iterable[Any] = self.grid.get_nodes()
        return nodes

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        """As Flower's."""
        pushed: Iterable[str] = self.grid.push_messages(messages)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """As Flower's, with an error in the place of an answer that cannot be read, or that names another message than asked."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        found = self.grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        return [self._read(*one) for one in zip(found.messages_list, found.message_object_trees, strict=True)]

    def _read(self, proto: Any, tree: Any) -> Any:
        import httpx
        from flwr.app import Error
        from flwr.common.constant import ErrorCode
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse

        asked, client = proto.metadata.reply_to_message_id, self.grid._runtime_client
        self.grid._client = _Handing(client, PullAppMessagesResponse(messages_list=[proto], message_object_trees=[tree]))
        try:
            (answer,) = self.grid.pull_messages([asked])
            if answer.metadata.reply_to_message_id == asked:
                return answer
            problem = "it names another message"
        except httpx.HTTPError:  # of the connection
            raise
        except Exception as raised:  # of whatever its bytes are
            problem = type(raised).__name__
            _log.info("an answer that cannot be read: %s", raised)
        finally:
            self.grid._client = client
        reason = f"an answer that cannot be read ({problem})"
        metadata, error = SimpleNamespace(reply_to_message_id=asked), Error(ErrorCode.MESSAGE_UNAVAILABLE, reason)
        return SimpleNamespace(metadata=metadata, error=error, has_error=lambda: True)  # made of nothing that it sent


class _Handing:
    """A connection that has already the answer to the next question for answers."""

    def __init__(self, client: Any, answer: Any) -> None:
        self._client, self._answer = client, answer

    def PullMessages(self, request: Any) -> Any:
        return self._answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
