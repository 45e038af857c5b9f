"""The processes of a run: one or many, the same code.

`torchrun` starts them and says who is who in the environment; `python train.py` is a world of one. Work comes
in units; rank r of R takes units r, r + R, ..., and `gather_units` puts the results back in order.
"""

import hashlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class World(NamedTuple):
    """Who this process is, and what it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(device: str) -> World:
    """Joins the processes that torchrun started, or makes a world of one.

    Args:
        device: "auto" (a GPU where there is one), "cpu" or "cuda".

    Raises: ValueError if a GPU is asked for and there is none for this process.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    count = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device == "cuda" and local_rank >= count:
        raise ValueError(f"local process {local_rank} needs a GPU of its own, this machine shows {count}")
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        torch.backends.cudnn.allow_tf32 = False  # else a float32 convolution is none
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    place = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    return World(dist.get_rank(), dist.get_world_size(), place)


def stop() -> None:
    """Leaves the processes' group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def clear_errors() -> Iterator[None]:
    """A ValueError inside, a mistake that a user can mend, becomes one line and exit status 2.

    One that a library raised has its traceback before it.
    """
    try:
        yield
    except ValueError as error:
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        if not Path(place).resolve().is_relative_to(Path(__file__).resolve().parent):
            traceback.print_exc()
        rank = int(os.environ.get("RANK", 0))
        if rank:
            time.sleep(1)  # the main process prints what all have found, before torchrun stops the others
        print(f"error{f' on rank {rank}' if rank else ''}: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # at once: leaving the group in order would wait for ranks that are in a collective


def from_main(value):
    """The main process's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def gather_units(local: Tensor) -> Tensor:
    """Results of all units, in the order of the units, on every rank.

    Args:
        local: this rank's, [n, ...]: of units rank, rank + size, ...; the same n on every rank.

    Returns: [n * size, ...], on the CPU.
    """
    local = local.detach().cpu().contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.stack(parts, 1).flatten(0, 1)


def mean_over_ranks(values: Tensor) -> Tensor:
    """Mean of a small CPU tensor over the ranks."""
    values = values.detach().clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def max_over_ranks(value: float) -> float:
    """Largest of the ranks' values."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def seeded_generator(*key: int | str) -> torch.Generator:
    """A CPU generator whose state depends on the key alone, not on rank, order or what was drawn before.

    >>> a, b = (torch.rand(1, generator=seeded_generator(0, "noise", i)) for i in (1, 2))
    >>> bool(a == torch.rand(1, generator=seeded_generator(0, "noise", 1))), bool(a == b)
    (True, False)
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
