"""Checkpoints: a run's progress on disk after each round, whole or not at all, without pickle.

    head.json            the run, the round, digests of what to read, the ledger's position: replaced last, by renaming
    journal.jsonl        one line a round: the history's record, who took part, whose cap is spent; the length in the head counts
    global-R.safetensors model, buffers, server optimiser and common policy state after round R; that of the round before is
                         kept for its model, which is the model before the last step
    states-R.safetensors states of the clients whose states changed in round R, kept while one of them is still current

They hold private states, so they are for their owner alone (modes 700 and 600).
What a round did not change is not written again, so a round costs the same with any number of clients, and a model is written
once. `begin` writes beside whatever else is done, in a thread; nothing may be released before `finish`.
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
class UnsavedRound:
    """What one round changed, as it was when the round was over; nothing of it changes while the next round's clients train.

    Args:
        took_part: clients, with the rounds that each took part in. states: of clients; current: the round that last
            changed each client's.
        parts: of the common file; previous: the file of the model before, where it is not among them.
        line: of the journal. spent: clients whose caps were spent. position: of the ledger.
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
class SavedModel:
    """A model that lies in a file, and how often it had been changed in place when it was written."""

    file: str
    model: Tensor
    version: int

    @classmethod
    def of(cls, file: str, model: Tensor) -> SavedModel:
        """The model as it is now."""
        return cls(file, model, model._version)

    def holds(self, model: Tensor) -> bool:
        """Whether the file holds this model."""
        return model is self.model and model._version == self.version


class RoundWriter(threading.Thread):
    """Writes a round beside the main thread and keeps what went wrong."""

    def __init__(self, round: int, write: Callable[[], None]) -> None:
        super().__init__(name="fedveil checkpoint")
        self.round = round
        self.problem: BaseException | None = None
        self._write = write

    def run(self) -> None:
        """Write it."""
        try:
            self._write()
        except BaseException as problem:
            self.problem = problem


_HEAD, _JOURNAL = "head.json", "journal.jsonl"
_DAMAGE = (OSError, KeyError, ValueError, TypeError, SafetensorError)


class Checkpoints:
    """The checkpoints of one run in a folder of their own.

    Args:
        folder: made if absent. identity: what must be the same for the run to go on, plain JSON values.
        ledger: whose position is saved with each round (see `ledger_position`), or None.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], ledger: Path | None = None) -> None:
        self.folder, self.identity, self.ledger = folder, identity, ledger
        self._round, self._length = 0, 0
        self._written = hashlib.sha256()  # of the journal
        self._digests: dict[str, str] = {}
        self._current: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._spent: set[int] = set()
        self._models: list[SavedModel] = []
        self._writer: RoundWriter | None = None

    @property
    def rounds(self) -> int:
        """Rounds that are saved."""
        return self._round

    @property
    def writing(self) -> bool:
        """Whether a round is on its way to the disk."""
        return self._writer is not None and self._writer.is_alive()

    def save(self, progress: Progress) -> None:
        """Write what the last round changed; when this returns, the run can go on from here, whatever happens.

        Raises:
            FedveilError: the disk is full or may not be written; what was saved before is untouched.
        """
        self.begin(progress)
        self.finish()

    def begin(self, progress: Progress) -> None:
        """Begin to write what the last round changed, beside whatever else is done before `finish`.

        Until then nothing may be released, or a crash would repeat more than one round; and the models, the server's state and
        the batch statistics of `progress` may be replaced, but not changed in place.
        """
        self.finish()
        done = self._changes(progress)
        self._writer = RoundWriter(progress.round, lambda: self._write(done))
        self._writer.start()

    def finish(self) -> None:
        """Wait until the round that was begun is saved.

        Raises:
            FedveilError: the disk is full or may not be written; what was saved before is untouched.
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
        """The saved progress, or None when no round was finished.

        Raises:
            ConfigError: saved by a run of another identity. FedveilError: a damaged checkpoint.
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

    def _changes(self, progress: Progress) -> UnsavedRound:
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
        return UnsavedRound(r, took_part, states, current, parts, previous, line, spent, position)

    def _write(self, done: UnsavedRound) -> None:
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
            sync_path(self.folder)  # what the head names is there before the head
            drafts.rename(self.folder / _HEAD)
        sync_path(self.folder)
        self._round, self._length, self._written, self._digests, self._current = r, length, written, digests, done.current
        self._seen.update(done.took_part)
        self._spent.update(done.spent)
        self._models = [SavedModel.of(name, done.parts["model"]), *(m for m in self._models if m.file == done.previous)]
        self._sweep()

    def _crowded(self, current: dict[int, int]) -> list[int]:
        """Clients of the oldest file, once there are many files, so that outdated states do not pile up."""
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
        models = [SavedModel.of(name, whole["model"])]
        if head["previous"] is not None:
            whole["previous"] = self._read_tree(head["previous"])["model"]
            models.append(SavedModel.of(head["previous"], whole["previous"]))
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
                    for kept, state in ((progress.policies, states["policy"]), (progress.privates, states["private"])):
                        if state is not None:
                            kept[c] = state
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
    """Version 0.2 saved one row, which counts as private until the run directory tells its halves."""
    return Record({"round": saved.pop("round")}, saved) if "round" in saved else Record(**saved)


def ledger_position(folder: Path) -> tuple[int, str]:
    """Number and digest of the last release that the ledger held when the checkpoint in `folder` was saved; (0, "") if none."""
    try:
        seq, digest = json.loads((folder / _HEAD).read_text(encoding="utf-8"))["ledger"] or (0, "")
    except FileNotFoundError:
        return 0, ""
    except _DAMAGE as problem:
        raise _damaged(folder, problem) from problem
    return int(seq), str(digest)


def _damaged(folder: Path, problem: Exception) -> FedveilError:
    return FedveilError(
        f"the checkpoint in {folder} is damaged ({problem!r}): put a copy of it back, or start the run anew in another "
        f"directory. What the ledger of this one holds was released and still counts: so much of the data's budget is spent"
    )
