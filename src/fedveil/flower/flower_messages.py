"""Our bytes inside Flower's messages: arrays of bytes that Flower carries in pieces and never reads.

Parts that several messages share, such as the model of a round, travel once: Flower stores what it carries by content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.flower.wire_format import WireError

_RECORD, _STYPE = "fedveil", "fedveil.wire"


def record(parts: Sequence[bytes]) -> Any:
    """A RecordDict with these parts."""
    from flwr.app import Array, ArrayRecord, RecordDict

    arrays = {str(i): Array("uint8", (len(part),), _STYPE, part) for i, part in enumerate(parts)}
    return RecordDict({_RECORD: ArrayRecord(arrays)})


def parts_of(content: Any) -> list[bytes]:
    """The parts of a RecordDict; raises WireError if it is not one of ours."""
    if list(content) != [_RECORD] or type(content[_RECORD]).__name__ != "ArrayRecord":
        raise WireError("a message that does not come from fedveil")
    arrays = list(content[_RECORD].items())
    if [name for name, _ in arrays] != [str(i) for i in range(len(arrays))] or any(a.stype != _STYPE for _, a in arrays):
        raise WireError("a message that does not come from fedveil")
    return [bytes(array.data) for _, array in arrays]


def instruction(node: int, parts: Sequence[bytes]) -> Any:
    """A message to a node."""
    from flwr.app import Message

    return Message(record(parts), dst_node_id=node, message_type="train")


def content_of(answer: Any) -> bytes | str:
    """The one part of an answer, or, as text, why there is none."""
    if answer.has_error():
        return f"its machine answered with an error (code {answer.error.code}): {printable(answer.error.reason)}"
    try:
        (part,) = parts_of(answer.content)
    except ValueError:
        return "it answered with more or fewer parts than one"
    except WireError as problem:
        return str(problem)
    return part


def printable(text: object) -> str:
    """The beginning of what a stranger wrote, fit for a log."""
    return "".join(c if c.isprintable() else " " for c in str(text))[:500]
