"""What the ranks of ``test_ranks.py`` run."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def total(rank, addend):
    rank.progress(f"adding on {rank.index}")
    value = torch.tensor([rank.index + addend])
    dist.all_reduce(value)
    return rank.index, rank.world_size, str(rank.device), value


def raises_on_one(rank):
    if rank.index == 1:
        raise ZeroDivisionError("the divisor of rank 1")
    dist.barrier()


def dies_on_one(rank):
    if rank.index == 1:
        os._exit(7)
    dist.barrier()


def hangs_on_one(rank):
    if rank.index == 1:
        time.sleep(600)
