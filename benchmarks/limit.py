"""The limit: how fast a round can be in plain PyTorch on this machine, by a hand-written loop that uses nothing of fedveil.

Two long-lived processes of one thread each; parameters and gradients are views of one flat vector; a client's examples are
gathered once per epoch and split into batches; torch._dynamo is imported before the fork (it is slow, and whatever needs it
would import it in each process); data, global vector and one accumulator row per process are shared memory;
processes wake each other through pipes. Each client's update is clipped, the sum is noised once and averaged.

    python benchmarks/limit.py --workload W1 --rounds 10

prints one line of JSON; `seconds` is the median of a round, `cpu_seconds` what the processes computed per round (less
dependent on what else the machine does). With `--lines` it does one round for each line on standard input and answers with the
round's seconds, so that another program can take turns with it. The examples are synthetic, of the shapes of the real ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

CLIP, NOISE_MULTIPLIER = 1.0, 1.0
GO, END = b"x", b"."


@dataclass(frozen=True)
class Workload:
    """Clients of a round and what each of them does."""

    model: str
    shape: tuple[int, ...]
    clients: int
    examples: int
    batch: int
    epochs: int
    lr: float


WORKLOADS = {
    "W0": Workload("linear", (1, 28, 28), 2, 32, 32, 1, 0.05),
    "W1": Workload("lenet5", (1, 28, 28), 10, 600, 32, 1, 0.05),
    "W2": Workload("lenet5", (1, 28, 28), 10, 600, 128, 5, 0.05),
    "W3": Workload("resnet18", (3, 32, 32), 10, 100, 50, 1, 0.05),
    "many": Workload("linear", (1, 28, 28), 400, 32, 32, 1, 0.05),
    "cohort100": Workload("resnet18", (3, 32, 32), 100, 50, 50, 1, 0.05),
    "mlp100m": Workload("mlp100m", (1, 28, 28), 4, 64, 32, 1, 0.05),
}
WIDTH = 9610
"""Of both hidden layers of mlp100m."""


class LeNet5(nn.Module):
    """61,706 parameters; with `pool_first` the ReLU runs on pooled values (same result, a quarter of the work)."""

    def __init__(self, pool_first: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)
        self.pool_first = pool_first

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for conv in (self.conv1, self.conv2):
            x = F.relu(F.max_pool2d(conv(x), 2)) if self.pool_first else F.max_pool2d(F.relu(conv(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


class Block(nn.Module):
    """Basic residual block with group normalisation."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.GroupNorm(32, out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.GroupNorm(32, out)
        short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.GroupNorm(32, out))
        self.short = nn.Identity() if channels == out and stride == 1 else short

    def forward(self, x: Tensor) -> Tensor:
        """Features."""
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.short(x))


def resnet18() -> nn.Module:
    """11,173,962 parameters."""
    blocks: list[nn.Module] = []
    channels = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(channels, out, stride), Block(out, out, 1)]
        channels = out
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def network(name: str, pool_first: bool) -> nn.Module:
    """The model of a workload."""
    if name == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    if name == "mlp100m":  # 100,011,279 parameters
        hidden = (nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(WIDTH, 10))
    return LeNet5(pool_first) if name == "lenet5" else resnet18()


def keep_memory() -> bool:
    """Tell glibc to keep freed memory (else every step pays page faults); False where there is no mallopt."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((trim_threshold, 2**31 - 1), (mmap_threshold, 2**30), (top_pad, 64 * 2**20))
    done = [mallopt(key, value) for key, value in settings]
    return all(done)


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A zero tensor in memory that children of a fork share."""
    count = math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(shape)


def flatten(model: nn.Module, channels_last: bool) -> tuple[Tensor, Tensor]:
    """Make parameters and gradients of `model` views of one vector each, and return the two vectors."""
    parameters = list(model.parameters())
    flat, grad = (torch.zeros(sum(p.numel() for p in parameters)) for _ in range(2))
    start = 0
    for p in parameters:
        piece = slice(start, start + p.numel())
        if channels_last and p.dim() == 4:
            o, c, h, w = p.shape
            value, slope = (vector[piece].view(o, h, w, c).permute(0, 3, 1, 2) for vector in (flat, grad))
        else:
            value, slope = flat[piece].view(p.shape), grad[piece].view(p.shape)
        value.copy_(p.data)
        p.data, p.grad = value, slope
        start += p.numel()
    return flat, grad


@dataclass(frozen=True)
class Shared:
    """What all processes see."""

    x: Tensor
    y: Tensor
    model: Tensor
    sums: Tensor


def client(net: nn.Module, flat: Tensor, grad: Tensor, work: Workload, x: Tensor, y: Tensor, draw: torch.Generator) -> None:
    """Local training from `flat`, in place."""
    for _ in range(work.epochs):
        order = torch.randperm(work.examples, generator=draw)
        for xb, yb in zip(x[order].split(work.batch), y[order].split(work.batch), strict=True):
            grad.zero_()
            F.cross_entropy(net(xb), yb).backward()
            flat.add_(grad, alpha=-work.lr)


def worker(mine: range, work: Workload, net: nn.Module, vectors: tuple[Tensor, Tensor], memory: Shared, r: int, w: int) -> None:
    """Train the clients in `mine` whenever GO arrives on `r`, leave the sum of clipped updates, answer on `w`."""
    flat, grad = vectors
    total = memory.sums[mine.start]
    while os.read(r, 1) == GO:
        total.zero_()
        for i in mine:
            flat.copy_(memory.model)
            client(net, flat, grad, work, memory.x[i], memory.y[i], torch.Generator().manual_seed(i))
            flat.sub_(memory.model)
            total.add_(flat, alpha=min(1.0, CLIP / max(flat.norm().item(), 1e-12)))
        os.write(w, GO)


def rounds(work: Workload, processes: int, pool_first: bool, channels_last: bool) -> Iterator[float]:
    """Do one round after the other and yield its seconds; the processes end when the generator is closed."""
    torch.manual_seed(1)
    net = network(work.model, pool_first)
    vectors = flatten(net, channels_last)
    size = len(vectors[0])
    x = shared(work.clients, work.examples, *work.shape).normal_()
    if channels_last:
        x = shared(*x.movedim(2, -1).shape).copy_(x.movedim(2, -1)).movedim(-1, 2)
    memory = Shared(
        x,
        shared(work.clients, work.examples, dtype=torch.int64).random_(10),
        shared(size).copy_(vectors[0]),
        shared(processes, size),
    )
    ends = [fork(rank, processes, work, net, vectors, memory) for rank in range(processes)]
    noise, draw = torch.empty(size), torch.Generator().manual_seed(2)

    def one() -> None:
        for _, go, _ in ends:
            os.write(go, GO)
        for _, _, done in ends:
            if not os.read(done, 1):
                raise RuntimeError("a process ended")
        noise.normal_(generator=draw).mul_(NOISE_MULTIPLIER * CLIP)
        memory.model.add_(memory.sums.sum(0).add_(noise), alpha=1 / work.clients)

    try:
        while True:
            yield timed(one)
    finally:
        for pid, go, _ in ends:
            os.write(go, END)
            os.waitpid(pid, 0)


def fork(
    rank: int, processes: int, work: Workload, net: nn.Module, vectors: tuple[Tensor, Tensor], memory: Shared
) -> tuple[int, int, int]:
    """Start one process; its id, the pipe that wakes it and the pipe on which it answers."""
    (go_r, go_w), (done_r, done_w) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_w), os.close(done_r)
        worker(range(rank, work.clients, processes), work, net, vectors, memory, go_r, done_w)
        os._exit(0)
    os.close(go_r), os.close(done_w)
    return pid, go_w, done_r


def timed(function: Callable[[], None]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    """Measure one workload and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="W1")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pool-first", action="store_true", help="max-pool before ReLU in LeNet-5: the same values, less work")
    parser.add_argument("--channels-last", action="store_true", help="ResNet-18 and its images in channels_last")
    parser.add_argument("--default-malloc", action="store_true", help="leave glibc's allocator as it is")
    parser.add_argument("--lines", action="store_true", help="one round for each line on standard input")
    options = parser.parse_args()
    if not hasattr(os, "fork"):
        sys.exit("limit.py needs os.fork")
    kept = not options.default_malloc and keep_memory()
    torch.set_num_threads(1)
    turns = rounds(WORKLOADS[options.workload], options.processes, options.pool_first, options.channels_last)
    next(turns)
    if options.lines:
        print("ready", flush=True)
        for _ in sys.stdin:
            print(next(turns), flush=True)
        return
    times = [next(turns) for _ in range(options.rounds)]
    turns.close()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {
        "workload": options.workload,
        "seconds": statistics.median(times),
        "cpu_seconds": (spent.ru_utime + spent.ru_stime) / (options.rounds + 1),
        "rounds": times,
        "mallopt": kept,
    }
    options = {k: getattr(options, k) for k in ("processes", "pool_first", "channels_last")}
    print(json.dumps(report | options | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
