"""One client's training in a thread that runs only while the engine waits for it: a coroutine that needs nothing of `Client`.

No two lanes ever run at the same time, so nothing in them needs a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fedveil.federation.round import Failure, Work
    from fedveil.training.local import GradientSource, Local


@dataclass
class Request:
    """The gradient of a batch, asked for by the client whose model is row `row`; answered with its loss, or why there is none."""

    row: int
    local: Local
    source: GradientSource
    x: Tensor
    y: Tensor
    answer: Tensor | BaseException | None = None


class _Abandoned(KeyboardInterrupt):
    """Ends a lane whose round was given up; no failure of its client."""


class ClientThread:
    """Runs `work`, stopping at each gradient that it asks for; starts at once and returns at the first stop.

    Attributes:
        request: what it waits for. result: what `work` returned or raised, once it has ended.
    """

    def __init__(self, work: Callable[[ClientThread], Work | Failure]) -> None:
        self.request: Request | None = None
        self.result: Work | Failure | BaseException | None = None
        self._work, self._given_up = work, False
        self._go: SimpleQueue[None] = SimpleQueue()
        self._stopped: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.resume()

    def resume(self) -> None:
        """Let it run, with its request answered, until it asks again or ends."""
        self._go.put(None)
        self._stopped.get()

    def gradient(self, request: Request) -> Tensor:
        """Called inside the lane: stop until the request is answered."""
        self.request = request
        self._stopped.put(None)
        self._go.get()
        if self._given_up:
            raise _Abandoned
        self.request = None
        if isinstance(request.answer, BaseException):
            raise request.answer
        assert request.answer is not None
        return request.answer

    def give_up(self) -> None:
        """End the thread where it stands."""
        self._given_up = True
        self._go.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._go.get()
        try:
            self.result = self._work(self)
        except BaseException as error:
            self.result = error
        self._stopped.put(None)


@dataclass(frozen=True)
class InStep:
    """A gradient source whose gradients are computed together with those of the other lanes."""

    inner: GradientSource
    lane: ClientThread
    row: int

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the inner source."""
        return self.inner.batches(local, x, y)

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Ask for the gradient; it is in `local.model.grad` when this returns."""
        return self.lane.gradient(Request(self.row, local, self.inner, x, y))
