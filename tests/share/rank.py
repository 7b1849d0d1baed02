"""One rank as a process of its own, in a gloo group: loads a share of a checkpoint and says what became of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

import streamer
from streamer.reference.config import LlamaConfig
from streamer.reference.engine import build_llama
from streamer.reference.parallel import Parallel

__all__ = ["Task", "run"]

Task = Mapping[str, Any]


def run(rank: int, size: int, rendezvous: str, task: Task, outcome: Connection) -> None:
    """Say "ready", load, and say what came of it.

    Args:
        task: ``url``, ``document`` (a Llama's configuration), ``options``; ``members`` of the group, if not all;
            ``late``: seconds to wait, by rank.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    dist.barrier()  # a rank that ends while others still connect to it would end them too
    members: Sequence[int] = task.get("members", range(size))
    group = dist.new_group(list(members))
    if rank not in members:
        outcome.send(("ready", os.getpid()))
        outcome.send(("idle", None))
        return
    assert isinstance(group, dist.ProcessGroup)
    place = list(members).index(rank)
    parallel = Parallel(place, len(members), group)
    model = build_llama(LlamaConfig.from_dict(task["document"]), parallel, load_device="cpu")
    outcome.send(("ready", os.getpid()))
    time.sleep(task.get("late", {}).get(rank, 0))
    try:
        report = streamer.load(model, task["url"], task["options"], group=group)
    except streamer.errors.StreamError as error:
        outcome.send(("error", error))
        os._exit(1)  # the others may be gone, and gloo would wait for them
    # As bytes: tensors would be sent as handles of memory that ends with this process.
    outcome.send(("loaded", (report, safetensors.torch.save(dict(model.state_dict())))))
    dist.barrier(group)
