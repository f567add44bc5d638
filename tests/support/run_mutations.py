"""Forged run directories: everything that somebody might change of a run, one change each."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forged_ledger import ForgedLedger, content

UNBOUND = ("checkpoint/", "noise-state")
Apply = Callable[[Path], None]


@dataclass(frozen=True)
class Mutation:
    """One change of a run directory of one kind.

    Args:
        way: the kind of change. field: what of it; together they are its name in the list of what only a pin catches.
        detail: tells it from others of the same name. apply: makes the change in a copy of the run.
    """

    run: str
    way: str
    field: str
    detail: str
    apply: Apply

    @property
    def name(self) -> str:
        """Kind of change and field."""
        return f"{self.way}: {self.field}"


def mutations(runs: Mapping[str, Path]) -> list[Mutation]:
    """All of them, in the same order each time."""
    return [
        mutation for name in runs for make in _MAKERS for mutation in make(name, runs, random.Random(f"{name} {make.__name__}"))
    ]


def applied(mutation: Mutation, runs: Mapping[str, Path], folder: Path) -> Path:
    """A changed copy of the run."""
    target = folder / "run"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(runs[mutation.run], target)
    mutation.apply(target)
    return target


def changed(run: Path, original: Path) -> bool:
    """Whether anything that the run says differs; the bytes of a database may differ without that."""
    files = sorted(file.relative_to(original) for file in original.rglob("*") if file.is_file() and file.name != "ledger.sqlite")
    if files != sorted(file.relative_to(run) for file in run.rglob("*") if file.is_file() and file.name != "ledger.sqlite"):
        return True
    same = all((run / file).read_bytes() == (original / file).read_bytes() for file in files)
    ledger = run / "ledger.sqlite"
    if same and ledger.exists() and ledger.stat().st_size == (original / "ledger.sqlite").stat().st_size:
        try:
            return content(run) != content(original)
        except Exception:
            return True
    return True


def bound_files(run: Path) -> list[str]:
    """Files that a digest, the chain or the head covers."""
    names = sorted(file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file())
    return [name for name in names if not name.startswith(UNBOUND)]


# --- bytes and files ---------------------------------------------------------------------------------------------------


def _bytes(name: str, runs: Mapping[str, Path], chance: random.Random) -> Iterator[Mutation]:
    for file in bound_files(runs[name]):
        size = (runs[name] / file).stat().st_size
        for _ in range(3):
            yield Mutation(
                name, "a bit flipped", file, str(place := chance.randrange(size)), _flip(file, place, chance.randrange(8))
            )
        for cut in (0, size // 2, size - 1):
            yield Mutation(name, "truncated", file, str(cut), _rewrite(file, lambda old, cut=cut: old[:cut]))
        for more in (b"\n", b"\0" * 4096):
            yield Mutation(name, "extended", file, str(len(more)), _rewrite(file, lambda old, more=more: old + more))
        yield Mutation(name, "removed", file, "", lambda run, file=file: (run / file).unlink())
        yield Mutation(name, "renamed", file, "", lambda run, file=file: (run / file).rename(run / f"{file}.old"))
    for _ in range(40):  # in the pages in use, where the content changes
        yield Mutation(
            name, "a bit flipped", "a row", str(seed := chance.random()), lambda run, seed=seed: _flip_content(run, seed)
        )


def _flip(file: str, place: int, bit: int) -> Apply:
    def apply(run: Path) -> None:
        if file == "ledger.sqlite":
            return _flip_content(run, place)
        data = bytearray((run / file).read_bytes())
        data[place] ^= 1 << bit
        (run / file).write_bytes(data)
        return None

    return apply


def _flip_content(run: Path, seed: float) -> None:
    """Flip a bit of the ledger's file that changes what it holds: SQLite leaves room whose bytes mean nothing."""
    chance, path, before = random.Random(seed), run / "ledger.sqlite", content(run)
    original = path.read_bytes()
    while True:
        data = bytearray(original)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            if content(run) != before:
                return
        except Exception:  # SQLite cannot read it any more
            return


def _rewrite(file: str, change: Callable[[bytes], bytes]) -> Apply:
    return lambda run: (run / file).write_bytes(change((run / file).read_bytes())) and None


def _swapped(name: str, runs: Mapping[str, Path], chance: random.Random) -> Iterator[Mutation]:
    for other, source in runs.items():
        if other == name:
            continue
        for files in (["ledger.sqlite"], ["ledger.sqlite-head"], ["ledger.sqlite", "ledger.sqlite-head"], ["statement.json"]):
            yield Mutation(name, "from another run", " and ".join(files), other, _copy(source, files))
        for files in (["statement.json", "statement.md"], ["config.toml"], ["history.csv"], ["data.json"], ["model.safetensors"]):
            yield Mutation(name, "from another run", " and ".join(files), other, _copy(source, files))
        both = ["statement.json", "statement.md"]
        yield Mutation(name, "from another run, bound", "statement", other, _bound(_copy(source, both)))
        yield Mutation(name, "from another run, bound", "configuration", other, _bound(_copy(source, ["config.toml"])))
        rows = ForgedLedger.read(source).rows
        yield Mutation(
            name, "from another run, bound", "rows", other, _rows(lambda _, rows=rows: [dict(row) for row in rows], True)
        )


def _copy(source: Path, files: list[str]) -> Apply:
    def apply(run: Path) -> None:
        for file in files:
            shutil.copyfile(source / file, run / file)

    return apply


def _bound(change: Apply) -> Apply:
    """The same change with all digests, the chain, the head and the closing rewritten."""

    def apply(run: Path) -> None:
        change(run)
        ledger = ForgedLedger.read(run)
        ledger.bind(run)
        ledger.write(coherent=True)

    return apply


# --- rows --------------------------------------------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def _row_changes(name: str, runs: Mapping[str, Path], chance: random.Random) -> Iterator[Mutation]:
    rows = ForgedLedger.read(runs[name]).rows
    for column, old in rows[-1].items():
        for new in _others(column, old):
            for place in (0, -1):
                where = f"row {place}, {new!r}"
                change = lambda rows, c=column, p=place, new=new: [{**r, c: new} if r is rows[p] else r for r in rows]  # noqa: E731
                yield Mutation(name, "row edited", column, where, _rows(change, False, False))
                if column not in ("seq", "digest", "sealed"):  # which follow from the others
                    yield Mutation(name, "row edited, chain rewritten", column, where, _rows(change, True))
    for place in (0, len(rows) // 2, len(rows) - 1):
        changes: dict[str, Callable[[Rows], Rows]] = {
            "deleted": lambda rows, p=place: rows[:p] + rows[p + 1 :],
            "duplicated": lambda rows, p=place: [*rows[: p + 1], *map(dict, rows[p:])],
            "exchanged": lambda rows, p=place: [*rows[:p], *reversed(rows[p:])] if p else [*rows[1:], rows[0]],
        }
        for way, rearranged in changes.items():
            if rearranged(rows) != rows:
                yield Mutation(name, "rows rearranged", way, str(place), _rows(rearranged, False))
                yield Mutation(name, "rows rearranged, chain rewritten", way, str(place), _rows(rearranged, True))
    weaker = lambda rows: [{**r, **_weaker(r)} for r in rows]  # noqa: E731
    if rows[0]["event"] != "unbounded":
        yield Mutation(name, "rows edited, chain rewritten", "less mu", "", _rows(weaker, True))
        for many in (4, 10**6):  # as if so many had brought noise of their own
            shared = lambda rows, n=many: [{**r, **_in_shares(r, n)} for r in rows]  # noqa: E731
            yield Mutation(name, "rows edited, chain rewritten", "noise in shares", str(many), _rows(shared, True))


def _in_shares(row: dict[str, Any], many: int) -> dict[str, Any]:
    """The same cost with less noise, of which so many participants would add as much each."""
    less = [std / many**0.5 for std in json.loads(row["noise_std"])]
    return {"noise_std": json.dumps(less), "participants": many}


def _weaker(row: dict[str, Any]) -> dict[str, Any]:
    """Half the cost, without the clip and the noise that it would take."""
    return {"mu": row["mu"] and row["mu"] / 2, "noise_multiplier": row["noise_multiplier"] and row["noise_multiplier"] * 2}


def _others(column: str, old: Any) -> list[Any]:
    if column == "seq":
        return [old + 1000]
    if isinstance(old, int):
        return [old + 1, old - 1]
    if isinstance(old, float):
        return [old * 0.9, old * 1.5]
    if isinstance(old, str) and old.startswith("["):
        return ["[]", re.sub(r"\d+\.\d+", "0.25", old)] if re.search(r"\d\.\d", old) else ["[1]"]
    return {"event": ["fixed", "unbounded"], "view": ["final"], "unit": ["item"]}.get(column, [f"{old or ''}x"])


def _rows(change: Callable[[Rows], Rows], coherent: bool, rearranged: bool = True) -> Apply:
    def apply(run: Path) -> None:
        ledger = ForgedLedger.read(run)
        ledger.rows = [dict(row) for row in change(ledger.rows)]
        if rearranged:
            ledger.rows = [{**row, "seq": i + 1} for i, row in enumerate(ledger.rows)]
        ledger.write(coherent=coherent)

    return apply


# --- numbers -----------------------------------------------------------------------------------------------------------


def _numbers(name: str, runs: Mapping[str, Path], chance: random.Random) -> Iterator[Mutation]:
    statement = json.loads((runs[name] / "statement.json").read_text())
    for path, old in _leaves(statement):
        field = ".".join(str(key) for key in path if not isinstance(key, int))
        for new in (old * 0.5, old * 3) if isinstance(old, float) else (old - 1, old + 2) if isinstance(old, int) else ("0.01",):
            new = float(new) if old == "inf" else new
            change = _number(path, new)
            where = f"{'.'.join(map(str, path))} = {new}"
            yield Mutation(name, "statement's number", field, where, change)
            yield Mutation(name, "statement's number, bound", field, where, _bound(change))
            yield Mutation(name, "statement's number, bound, with its page", field, where, _bound(_with_page(change, old, new)))


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from _leaves(item, (*path, key))
    if (isinstance(value, int | float) and not isinstance(value, bool)) or value == "inf":
        yield path, value


def _number(path: tuple[Any, ...], new: Any) -> Apply:
    def apply(run: Path) -> None:
        statement = json.loads((run / "statement.json").read_text())
        place = statement
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = new
        (run / "statement.json").write_text(json.dumps(statement, indent=2))

    return apply


def _with_page(change: Apply, old: Any, new: Any) -> Apply:
    def apply(run: Path) -> None:
        change(run)
        page = (run / "statement.md").read_text()
        for form in (".4g", "g"):
            before, after = f"{float(old):{form}}", f"{float(new):{form}}"
            page = re.sub(rf"(?<![\d.]){re.escape(before)}(?![\d])", after, page)
        (run / "statement.md").write_text(page)

    return apply


# --- the whole ---------------------------------------------------------------------------------------------------------


def _wholes(name: str, runs: Mapping[str, Path], chance: random.Random) -> Iterator[Mutation]:
    def closed(edit: Callable[[dict[str, Any]], object]) -> Apply:
        def apply(run: Path) -> None:
            ledger = ForgedLedger.read(run)
            assert ledger.closing is not None
            end = json.loads(ledger.closing["content"])
            edit(end)
            ledger.closing["content"] = json.dumps(end, sort_keys=True)
            ledger.write(coherent=True)

        return apply

    yield Mutation(name, "closing", "removed", "", _unclosed)
    yield Mutation(name, "closing, rewritten", "rounds", "", closed(lambda end: end.update(rounds=end["rounds"] - 1)))
    yield Mutation(name, "closing, rewritten", "ended", "", closed(lambda end: end.update(ended="the budget is spent")))
    yield Mutation(name, "closing, rewritten", "file left out", "", closed(lambda end: end["files"].pop("history.csv")))
    for rounds in (1, 2):
        yield Mutation(name, "rolled back", "ledger and head", str(rounds), lambda run, n=rounds: _cut(run, n, False))
        yield Mutation(name, "cut coherently", "all but the statement", str(rounds), lambda run, n=rounds: _cut(run, n, True))
        yield Mutation(
            name, "cut coherently, as ended early", "all", str(rounds), lambda run, n=rounds: _cut(run, n, True, "stopped")
        )
    for size in (1, 4096):
        log = lambda run, size=size: (run / "ledger.sqlite-wal").write_bytes(b"\7" * size) and None  # noqa: E731
        yield Mutation(name, "log beside the ledger", "ledger.sqlite-wal", str(size), log)
    edits = {
        "privacy.epsilon": (r"^epsilon = .*$", "epsilon = 0.5"),
        "privacy.delta": (r"^delta = .*$", "delta = 1e-9"),
        "training.rounds": (r"^rounds = \d+$", "rounds = 2"),
        "training.clients_per_round": (r"^clients_per_round = \d+$", "clients_per_round = 2"),
        "privacy.view": (r'^view = "\w+"$', 'view = "final"'),
        "privacy.unit": (r'^unit = "\w+"$', 'unit = "item"'),
        "method.name": (r"^\[method\]\nname = .*$", '[method]\nname = "adaptive-clipping"'),
    }
    for field, (old, new) in edits.items():
        if re.search(old, (runs[name] / "config.toml").read_text(), re.M):
            change = _rewrite("config.toml", lambda text, old=old, new=new: re.sub(old, new, text.decode(), flags=re.M).encode())
            yield Mutation(name, "configuration", field, "", change)
            yield Mutation(name, "configuration, bound", field, "", _bound(change))
    for file in bound_files(runs[name]):
        if file.endswith(".csv"):
            for way, table in _TABLES.items():
                change = _table(file, table)
                yield Mutation(name, "table", way, file, change)
                yield Mutation(name, "table, bound", f"{way} of {file}", "", _bound(change))
    yield Mutation(name, "published form, with its own chain", "participants", "", _published(False))
    yield Mutation(name, "published form, with its own chain", "time", "", _published(True))


def _unclosed(run: Path) -> None:
    ledger = ForgedLedger.read(run)
    ledger.closing = None
    ledger.write(coherent=False)


def _cut(run: Path, rounds: int, coherent: bool, ended: str = "") -> None:
    """The ledger, and if coherent the tables and the closing, as after so many rounds."""
    ledger = ForgedLedger.read(run)
    ledger.rows = [row for row in ledger.rows if row["round"] < rounds]
    if not coherent:
        ledger.closing = None
        return ledger.write(coherent=True)
    for file in (*run.glob("*.csv"), *(run / "private").glob("*.csv")):
        with file.open(newline="") as text:
            header, *lines = list(csv.reader(text))
        with file.open("w", newline="") as text:
            csv.writer(text).writerows([header, *(line for line in lines if int(line[0]) < rounds)])
    assert ledger.closing is not None
    ledger.closing["content"] = json.dumps({**json.loads(ledger.closing["content"]), "rounds": rounds, "ended": ended})
    ledger.bind(run)
    return ledger.write(coherent=True)


Table = list[dict[str, str]]
_TABLES: dict[str, Callable[[Table], Table]] = {
    "last row dropped": lambda rows: rows[:-1],
    "row repeated": lambda rows: [*rows, rows[-1]],
    "numbers raised": lambda rows: [
        {k: v if k in ("round", "layer", "client", "participants") else f"{v}1" for k, v in r.items()} for r in rows
    ],
    "fewer participants": lambda rows: [{**r, **{k: "1" for k in r if k == "participants"}} for r in rows],
}


def _table(file: str, change: Callable[[Table], Table]) -> Apply:
    def apply(run: Path) -> None:
        with (run / file).open(newline="") as text:
            rows = list(csv.DictReader(text))
        with (run / file).open("w", newline="") as text:
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(change(rows))

    return apply


def _published(only_time: bool) -> Apply:
    """Hidden columns emptied in a copy that keeps the digests; a forger keeps what he wants to be believed."""

    def apply(run: Path) -> None:
        ledger = ForgedLedger.read(run)
        for row in ledger.rows:
            row["time"] = None
            if not only_time:
                row["nonce"], row["participants"] = None, (row["participants"] or 0) + 1
        ledger.write(coherent=False)

    return apply


_MAKERS = (_bytes, _swapped, _row_changes, _numbers, _wholes)
