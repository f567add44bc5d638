"""The secret state of a mechanism: on disk, and synced, before anything that depends on it leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.errors import ConfigError, LedgerError
from fedveil.ledger.owner_only import owner_only

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]


STATE_FILE = "noise-state.safetensors"
"""Its name in a run directory."""


class NoiseMemory:
    """Named arrays that a mechanism keeps from one round to the next, with the round that wrote them.

    Whoever reads them can take the noise off what was released: the file is for its owner alone (mode 600).

    Args:
        path: of the file, or None for a run without a directory, whose state then ends with the process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._held: Arrays | None = None
        self._plan: bytes | None = None

    def read(self) -> Arrays:
        """What was written last; empty before the first write.

        Raises:
            LedgerError: the file is damaged; the run cannot go on, because its noise would not be what was charged.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        if self._held is None:
            try:
                self._held = load(self.path.read_bytes()) if self.path is not None and self.path.exists() else {}
            except (OSError, SafetensorError) as problem:
                raise LedgerError(f"{self.path}: the state of the noise cannot be read ({problem}); start anew") from problem
        return self._held

    def hold_to(self, plan: bytes) -> None:
        """Write the digest of this plan with all that follows: a price that is paid once is that of one plan for all rounds.

        Raises:
            ConfigError: what is kept was written under another plan; nothing may leave.
        """
        held = self.read()
        if held and ("plan" not in held or held["plan"].tobytes() != plan):
            raise ConfigError(
                "noise correlated over the rounds was charged for the plan of its first round, and this round has another clip, "
                "noise, support, extra or mechanism: make the same plan in every round"
            )
        self._plan = plan

    def copied(self) -> NoiseMemory:
        """The same state in memory alone, for whoever looks at a release without making one."""
        copy = NoiseMemory()
        copy._held = dict(self.read())
        return copy

    def write(self, arrays: Arrays) -> None:
        """Replace what is kept; when this returns it survives a crash.

        Raises:
            LedgerError: it cannot be written; nothing may leave.
        """
        from safetensors.numpy import save

        if self._plan is not None:
            arrays = {**arrays, "plan": np.frombuffer(self._plan, np.uint8)}
        if self.path is not None:
            draft = self.path.with_name(self.path.name + ".part")
            try:
                with open(draft, "wb", opener=owner_only) as file:
                    file.write(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(self.path)
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
            except OSError as problem:
                raise LedgerError(
                    f"cannot write {self.path}: {problem.strerror or problem}; nothing was released: make room, then resume"
                ) from problem
        self._held = arrays
