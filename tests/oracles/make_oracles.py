"""Write `seeded-runs.json` and `audits.json` anew: only where a change of bits is meant, and is said in CHANGELOG.md.

PYTHONPATH=tests/support python tests/oracles/make_oracles.py [runs] [audits] ["name of a run" ...]

Where runs are named, all others keep their digests.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from seeded_digests import ENGINES, ORACLES, audit_numbers, audited, demo_digest, digest, machine, seeded_runs


def write(name: str, found: dict[str, Any]) -> None:
    """Write the digests and the machine on which they hold."""
    text = json.dumps({"machine": machine()} | found, indent=0, ensure_ascii=False)
    (ORACLES / name).write_text(text + "\n", encoding="utf-8")


def main(parts: list[str]) -> None:
    """Run everything, or the named runs, once."""
    logging.disable()
    warnings.simplefilter("ignore")
    named = {*parts} - {"runs", "audits"}
    with tempfile.TemporaryDirectory() as folder:
        if "runs" in parts or named:
            runs: dict[str, Any] = json.loads((ORACLES / "seeded-runs.json").read_text(encoding="utf-8")) if named else {}
            assert runs.pop("machine", machine()) == machine(), "digests of this machine would stand beside those of another"
            if not named:
                runs["demo"] = {"stacked": demo_digest(Path(folder, "demo"))}
            for number, (name, configuration, data) in enumerate(seeded_runs()):
                if not named or name in named:
                    places = ((engine, Path(folder, f"{number}-{engine}")) for engine in ENGINES)
                    runs[name] = {engine: digest(configuration, data, engine, place) for engine, place in places}
                    print(name, runs[name], flush=True)
            write("seeded-runs.json", runs)
        if "audits" in parts:
            write("audits.json", {name: audit_numbers(configuration) for name, configuration in audited()})


if __name__ == "__main__":
    main(sys.argv[1:] or ["runs", "audits"])
