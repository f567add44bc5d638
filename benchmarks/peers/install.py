"""Make each peer's own environment, outside the repository.

    python benchmarks/peers/install.py                       # all, under ~/.cache/fedveil-peers
    FEDVEIL_PEERS=/somewhere python benchmarks/peers/install.py opacus pfl

Python 3.11, the torch of constraints.txt (its CPU build must be what `pip install torch==...` finds). Some gigabytes of disk.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(os.environ.get("FEDVEIL_PEERS", Path.home() / ".cache" / "fedveil-peers"))
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@dataclass(frozen=True)
class Peer:
    """What its environment needs.

    Args:
        package: the peer itself. needs: what else its import needs, where its own list is not used.
        alone: install it without the packages it asks for (and whatever Python it asks for).
        lazy: make all its annotations lazy and drop its type parameters, as Python 3.14, for which it is made, would do.
    """

    package: str
    needs: tuple[str, ...] = ()
    alone: bool = False
    lazy: bool = False


PEERS = {
    "opacus": Peer("opacus==1.6.0"),
    "pfl": Peer("pfl[pytorch]==0.6.0"),
    "flower": Peer("flwr[simulation]==1.41.0"),
    "blazefl": Peer("blazefl==3.0.0", needs=("numpy", "tqdm"), alone=True, lazy=True),
    "fluke": Peer(
        "fluke-fl==0.8.1",
        needs=("numpy", "pandas", "scikit-learn", "torchmetrics", "rich", "typer", "psutil", "diskcache", "pyyaml", "omegaconf",
               "cerberus", "hydra-core", "opacus", "requests", "matplotlib", "seaborn"),
        alone=True,
    ),
}  # fmt: skip


def interpreter(peer: str) -> Path:
    """The Python of a peer's environment; an error that says how to make it where it is missing."""
    path = ROOT / peer / "bin" / "python"
    if not path.exists():
        raise FileNotFoundError(f"{peer} has no environment: run python benchmarks/peers/install.py {peer}")
    return path


def install(name: str) -> None:
    """Make or renew one environment."""
    peer, folder = PEERS[name], ROOT / name
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, torch], check=True)
    if peer.alone:
        subprocess.run([*pip, torch, *peer.needs], check=True)
        subprocess.run([*pip, "--no-deps", "--ignore-requires-python", peer.package], check=True)
    else:
        subprocess.run([*pip, torch, peer.package], check=True)
    if peer.lazy:
        for path in (folder / "lib").glob(f"python*/site-packages/{name}/**/*.py"):
            _made_lazy(path)


def _made_lazy(path: Path) -> None:
    text, line = path.read_text(), "from __future__ import annotations\n"
    if not text.startswith(line):
        path.write_text(line + re.sub(r"^def (\w+)\[\w+\]\(", r"def \1(", text, flags=re.MULTILINE))


def main() -> None:
    """Install the peers named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="peer", help=f"of {', '.join(PEERS)}; all by default")
    options = parser.parse_args()
    failed = []
    for name in options.peers or PEERS:
        try:
            install(name)
            print(f"{name}: {interpreter(name)}", flush=True)
        except (subprocess.CalledProcessError, KeyError) as error:
            failed.append(name)
            print(f"{name}: not installed: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
