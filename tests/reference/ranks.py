"""Runs a function on several processes that form a gloo group."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from streamer.reference.parallel import Parallel

T = TypeVar("T")


def run_on_ranks(size: int, function: Callable[..., T], *arguments: Any) -> list[T]:
    """Return ``function(parallel, *arguments)`` of every rank, in order."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(size, mp_context=context) as pool:
            running = [
                pool.submit(_run, function, rank, size, f"file://{folder}/rendezvous", arguments)
                for rank in range(size)
            ]
            return [future.result(timeout=240) for future in running]


def _run(function: Callable[..., T], rank: int, size: int, rendezvous: str, arguments: tuple[Any, ...]) -> T:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    try:
        return function(Parallel(rank, size, dist.group.WORLD), *arguments)
    finally:
        dist.destroy_process_group()
