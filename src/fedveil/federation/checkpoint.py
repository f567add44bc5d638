"""Checkpoints: a run's progress, saved to disk after each round, atomically and without pickle.

    head.json            the run, the round, digests of the files below, the ledger's position; replaced last, by renaming
    journal.jsonl        one line per round: the history's record, the participants, the clients whose caps are spent; only
                         the length that the head states is valid
    global-R.safetensors model, buffers, server optimiser and common policy state after round R; the previous round's file
                         is retained because it holds the model before the last step
    states-R.safetensors states of the clients whose states changed in round R, retained while one of them is current

Checkpoints hold private states, so only their owner can read them (modes 700 and 600).
Each round writes only what it changed, so the cost does not grow with the number of clients, and each model is written once.
`begin` writes in a background thread; nothing may be released before `finish` returns.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from fedveil.errors import ConfigError, FedveilError
from fedveil.federation.history import Record
from fedveil.federation.plain_state import decode, encode, own_copy, read_tree, tree_parts
from fedveil.federation.progress import Progress
from fedveil.ledger.files import Drafts, owner_only, owner_only_folder, read_head, sync_path

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _UnsavedRound:
    """Snapshot of what one round changed; training of the next round does not modify it.

    Args:
        took_part: number of rounds that each of this round's participants has taken part in. states: changed client states;
            current: for each client, the round that last changed its state.
        parts: contents of the global file; previous: name of the file with the previous model, if it is not among the parts.
        line: for the journal. spent: clients whose caps this round spent. position: of the ledger.
    """

    number: int
    took_part: dict[int, int]
    states: dict[str, Any]
    current: dict[int, int]
    parts: dict[str, Any]
    previous: str | None
    line: bytes
    spent: list[int]
    position: tuple[int, str] | None


@dataclass(frozen=True)
class _SavedModel:
    """A saved model, with PyTorch's in-place version counter at the time it was written."""

    file: str
    model: Tensor
    version: int

    @classmethod
    def of(cls, file: str, model: Tensor) -> _SavedModel:
        """Return a record of the model's current version."""
        return cls(file, model, model._version)

    def holds(self, model: Tensor) -> bool:
        """Return whether the file holds the model in its current version."""
        return model is self.model and model._version == self.version


class RoundWriter(threading.Thread):
    """Thread that writes a round in the background and stores the exception if that fails."""

    def __init__(self, round: int, write: Callable[[], None]) -> None:
        super().__init__(name="fedveil checkpoint")
        self.round = round
        self.problem: BaseException | None = None
        self._write = write

    def run(self) -> None:
        """Write the round."""
        try:
            self._write()
        except BaseException as problem:
            self.problem = problem


_HEAD, _JOURNAL = "head.json", "journal.jsonl"
_DAMAGE = (OSError, KeyError, ValueError, TypeError, SafetensorError)


class Checkpoints:
    """Checkpoints of one run, in a folder of their own.

    Args:
        folder: created if absent. identity: JSON values that must match for the run to be resumed.
        ledger: its position is saved with each round (see `ledger_position`); None without a ledger.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], ledger: Path | None = None) -> None:
        self.folder, self.identity, self.ledger = folder, identity, ledger
        self._round, self._length = 0, 0
        self._written = hashlib.sha256()  # SHA-256 of the journal
        self._digests: dict[str, str] = {}
        self._current: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._spent: set[int] = set()
        self._models: list[_SavedModel] = []
        self._writer: RoundWriter | None = None

    @property
    def rounds(self) -> int:
        """Return the number of saved rounds."""
        return self._round

    @property
    def writing(self) -> bool:
        """Return whether a round is being written."""
        return self._writer is not None and self._writer.is_alive()

    def save(self, progress: Progress) -> None:
        """Write what the last round changed; once this returns, the run can be resumed from here.

        Raises:
            FedveilError: the disk is full or not writable; the checkpoint before is untouched.
        """
        self.begin(progress)
        self.finish()

    def begin(self, progress: Progress) -> None:
        """Start to write what the last round changed, in a background thread, until `finish` is called.

        Until `finish` returns, nothing may be released, or a crash would repeat more than one round. The models, the server's
        state and the batch statistics of `progress` may be replaced, but not changed in place.
        """
        self.finish()
        done = self._changes(progress)
        self._writer = RoundWriter(progress.round, lambda: self._write(done))
        self._writer.start()

    def finish(self) -> None:
        """Wait until the round passed to `begin` is saved.

        Raises:
            FedveilError: the disk is full or not writable; the checkpoint before is untouched.
        """
        if (writer := self._writer) is None:
            return
        writer.join()
        self._writer = None
        if isinstance(problem := writer.problem, OSError):
            raise FedveilError(
                f"cannot save round {writer.round} in {self.folder}: {problem.strerror or problem}; the {self._round} rounds "
                f"before are safe: make room or give permission, then resume the run"
            ) from problem
        if problem is not None:
            raise problem

    def load(self) -> Progress | None:
        """Return the saved progress, or None if no round has been saved.

        Raises:
            ConfigError: the checkpoint belongs to a run with another identity. FedveilError: the checkpoint is damaged.
        """
        path = self.folder / _HEAD
        if not path.exists():
            return None
        try:
            head = json.loads(path.read_text(encoding="utf-8"))
            if head["identity"] != self.identity:
                raise ConfigError(
                    f"{self.folder} belongs to another run or to other data: {head['identity']}, not {self.identity}"
                )
            return self._load(head)
        except _DAMAGE as problem:
            if isinstance(problem, ConfigError):
                raise
            raise _damaged(self.folder, problem) from problem

    # --- writing ---

    def _changes(self, progress: Progress) -> _UnsavedRound:
        """Return what has changed since the last saved round, for `_write`."""
        r = progress.round
        took_part = {c: k for c, k in progress.seen.items() if self._seen.get(c) != k}
        changed = [c for c in took_part if c in progress.policies or c in progress.privates]
        current = self._current | dict.fromkeys(changed, r)
        changed = [*changed, *self._crowded(current)]
        current.update(dict.fromkeys(changed, r))
        states = {str(c): {"policy": own_copy(progress.policies.get(c)), "private": progress.privates.get(c)} for c in changed}
        parts = {part: getattr(progress, part) for part in ("model", "buffers", "server", "average")}
        parts["common"] = own_copy(progress.common)
        if progress.served:
            parts["served"] = progress.served
        before = progress.previous
        previous = next((saved.file for saved in self._models if before is not None and saved.holds(before)), None)
        if before is not None and previous is None:
            parts["previous"] = before
        spent = sorted(progress.spent - self._spent)
        rows = [] if not r else [{"record": vars(progress.history[-1]), "seen": [*took_part], "states": changed, "spent": spent}]
        line = "".join(json.dumps(encode(row, {}, "")) + "\n" for row in rows).encode()
        position = None if self.ledger is None else read_head(self.ledger)
        return _UnsavedRound(r, took_part, states, current, parts, previous, line, spent, position)

    def _write(self, done: _UnsavedRound) -> None:
        owner_only_folder(self.folder)
        r, name = done.number, f"global-{done.number}"
        with Drafts(private=True) as drafts:
            if done.states:
                self._write_tree(drafts, f"states-{r}", done.states)
            self._write_tree(drafts, name, done.parts)
            length = self._append(drafts, done.line)
            written = self._written.copy()
            written.update(done.line)
            keep = {name, done.previous or name, *(f"states-{k}" for k in done.current.values())}
            digests = {_JOURNAL: written.hexdigest(), **{file: self._digests[file] for file in sorted(keep)}}
            head = {
                "identity": self.identity,
                "round": r,
                "journal": length,
                "previous": done.previous,
                "sha256": digests,
                "ledger": done.position,
            }
            drafts.write(self.folder / _HEAD, [json.dumps(head).encode()])
            drafts.sync()
            for tree in (f"states-{r}", name) if done.states else (name,):
                drafts.rename(self._file(tree))
            sync_path(self.folder)  # files that the head names must exist before it
            drafts.rename(self.folder / _HEAD)
        sync_path(self.folder)
        self._round, self._length, self._written, self._digests, self._current = r, length, written, digests, done.current
        self._seen.update(done.took_part)
        self._spent.update(done.spent)
        self._models = [_SavedModel.of(name, done.parts["model"]), *(m for m in self._models if m.file == done.previous)]
        self._sweep()

    def _crowded(self, current: dict[int, int]) -> list[int]:
        """Return the clients of the oldest states file once there are over 64 files, so that outdated states do not pile up."""
        files = Counter(current.values())
        if len(files) <= 64:
            return []
        oldest = min(files)
        return [c for c, r in current.items() if r == oldest]

    def _append(self, drafts: Drafts, lines: bytes) -> int:
        path = self.folder / _JOURNAL
        file = open(path, "r+b" if path.exists() else "w+b", opener=owner_only)  # noqa: SIM115 (closed with the drafts)
        drafts.sync_too(file)
        file.truncate(self._length)
        file.seek(self._length)
        file.write(lines)
        file.flush()
        return file.tell()

    def _write_tree(self, drafts: Drafts, name: str, tree: dict[str, Any]) -> None:
        digest = hashlib.sha256()

        def hashed() -> Iterator[bytes | memoryview]:
            for part in tree_parts(tree):
                digest.update(part)
                yield part

        drafts.write(self._file(name), hashed())
        self._digests[name] = digest.hexdigest()

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _sweep(self) -> None:
        keep = {_HEAD, _JOURNAL, *(f"{name}.safetensors" for name in self._digests)}
        for path in self.folder.iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)

    # --- reading ---

    def _load(self, head: dict[str, Any]) -> Progress:
        if not {"sha256", "previous"} <= head.keys():
            raise FedveilError(f"the checkpoint in {self.folder} is of an earlier version: go on with that one")
        self._digests = head["sha256"]
        journal = (self.folder / _JOURNAL).read_bytes()[: head["journal"]]
        written = hashlib.sha256(journal)
        if written.hexdigest() != self._digests[_JOURNAL]:
            raise ValueError(f"{_JOURNAL} is not as it was written")
        rows = [decode(json.loads(line), {}) for line in journal.splitlines()]
        whole = self._read_tree(name := f"global-{head['round']}")
        models = [_SavedModel.of(name, whole["model"])]
        if head["previous"] is not None:
            whole["previous"] = self._read_tree(head["previous"])["model"]
            models.append(_SavedModel.of(head["previous"], whole["previous"]))
        progress = Progress(head["round"], **whole, history=[_record(row["record"]) for row in rows])
        current: dict[int, int] = {}
        for number, row in enumerate(rows, start=1):
            for c in row["seen"]:
                progress.seen[c] = progress.seen.get(c, 0) + 1
                progress.last[c] = number - 1
            current.update(dict.fromkeys(row["states"], number))
            progress.spent.update(row["spent"])
        for r in sorted(set(current.values())):
            for name, states in self._read_tree(f"states-{r}").items():
                c = int(name)
                if current.get(c) == r:
                    for states_of, state in ((progress.policies, states["policy"]), (progress.privates, states["private"])):
                        if state is not None:
                            states_of[c] = state
        self._round, self._length, self._written = head["round"], head["journal"], written
        self._current, self._seen, self._spent = current, dict(progress.seen), set(progress.spent)
        self._models = models
        return progress

    def _read_tree(self, name: str) -> dict[str, Any]:
        path = self._file(name)
        with path.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != self._digests[name]:
                raise ValueError(f"{path.name} is not as it was written")
        return read_tree(path)


def _record(saved: dict[str, Any]) -> Record:
    """Return the record of a journal line; version 0.2 saved one row, treated as private until the run directory splits it."""
    return Record({"round": saved.pop("round")}, saved) if "round" in saved else Record(**saved)


def ledger_position(folder: Path) -> tuple[int, str]:
    """Return number and digest of the ledger's last release when the checkpoint in `folder` was saved, or (0, "")."""
    try:
        seq, digest = json.loads((folder / _HEAD).read_text(encoding="utf-8"))["ledger"] or (0, "")
    except FileNotFoundError:
        return 0, ""
    except _DAMAGE as problem:
        raise _damaged(folder, problem) from problem
    return int(seq), str(digest)


def _damaged(folder: Path, problem: Exception) -> FedveilError:
    return FedveilError(
        f"the checkpoint in {folder} is damaged ({problem!r}): restore a copy of it, or start a new run in another directory. "
        f"The releases in this run's ledger still count: that part of the data's budget is spent"
    )
