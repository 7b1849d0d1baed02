"""Ranks of one machine, each a process of its own, that load one checkpoint together.

``python -m tests.benchmarks.ranks`` is one of them; `run_ranks` starts as many as there are to be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import runai
from tests.benchmarks.node_memory import Node
from tests.benchmarks.processes import MEASURED, READY, Row, Served, emit, measure, pin
from tests.benchmarks.rig import llama_config

__all__ = ["BASE", "ROWS", "SMALL", "Way", "run_ranks"]

SMALL = llama_config(layers=1, hidden=256, wide=256, heads=8, kv_heads=8, vocabulary=256)
MODULE, BASE = "tests.benchmarks.ranks", "share=auto"
_GLOO_SECONDS = 120


@dataclass(frozen=True)
class Way:
    """One row: how the ranks load.

    Attributes:
        share: the option, for s3stream; empty for Run:ai.
        is_distributed, is_limited: for Run:ai.
    """

    share: str = ""
    is_distributed: bool = False
    is_limited: bool = False

    def environ(self, ranks: int, buffer_bytes: int) -> dict[str, str]:
        if self.share:
            return {}
        found = {"RUNAI_STREAMER_DIST": "1"} if self.is_distributed else {}
        if self.is_limited:
            limit = buffer_bytes if self.is_distributed else buffer_bytes // ranks
            found["RUNAI_STREAMER_MEMORY_LIMIT"] = str(limit)
        return found


ROWS = {
    BASE: Way(share="auto"),
    "share=off": Way(share="off"),
    "Run:ai": Way(),
    "Run:ai, limited": Way(is_limited=True),
    "Run:ai, distributed": Way(is_distributed=True),
    "Run:ai, distributed, limited": Way(is_distributed=True, is_limited=True),
}


def rank_row(row: str, arguments: dict[str, Any]) -> None:
    """Measure one rank's load."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from streamer.reference.parallel import Parallel
    from tests.benchmarks.models import build, check

    # Imports may take every processor; threads made from here on inherit this.
    pin(1)()
    torch.set_num_threads(1)
    rank, size, way = arguments["rank"], arguments["size"], ROWS[row]
    dist.init_process_group(
        "gloo",
        init_method=arguments["rendezvous"],
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_GLOO_SECONDS),
    )
    parallel = Parallel(rank, size, dist.group.WORLD)
    model, facts, clock = build(arguments["config"], parallel), {}, {}
    _load(build(SMALL, parallel), "s3://bench/small", way, arguments)

    def work() -> int:
        clock["began"] = time.perf_counter()
        facts.update(_load(model, "s3://bench/large", way, arguments))
        clock["ended"] = time.perf_counter()
        return int(facts["nbytes"])

    sample = measure(work, meet=dist.barrier)
    check(model, Path(arguments["file"]), parallel)
    dist.barrier()
    dist.destroy_process_group()
    emit(sample, **clock, **facts)


def _load(model: Any, url: str, way: Way, arguments: Mapping[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    import streamer

    size = arguments["size"]
    if not way.share:
        return {"nbytes": runai.load(model, url, is_distributed=way.is_distributed)}
    options = {
        "endpoint_url": arguments["endpoint"],
        "share": way.share,
        "buffer_bytes": arguments["buffer_bytes"],
        **arguments.get("options", {}),
    }
    report = streamer.load(model, url, options, group=dist.group.WORLD)
    together = report.sharing.ranks if report.sharing else 1
    if together != (size if way.share == "auto" else 1):
        raise RuntimeError(f"{together} of {size} ranks shared under share={way.share}")
    arena = report.sharing.arena_bytes if report.sharing else 0
    return {"nbytes": report.fetched_bytes, "arena_bytes": arena, "peak_buffer_bytes": report.peak_buffer_bytes}


def run_ranks(
    row: str, size: int, arguments: Mapping[str, Any], server: Served, *, samples_memory: bool = False
) -> dict[str, Any]:
    """Start the ranks of one row, have them load together, and put together what they say.

    Args:
        arguments: ``config`` of the model, ``file`` to compare with and ``file_bytes``, ``buffer_bytes``, and more
            ``options`` of s3stream, if there are any.
    """
    environ = {
        **ROWS[row].environ(size, arguments["buffer_bytes"]),
        "AWS_ENDPOINT_URL": server.endpoint,
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="s3stream-bench-"))
        common = {**arguments, "endpoint": server.endpoint, "size": size, "rendezvous": f"file://{folder}/rendezvous"}
        ranks = [
            stack.enter_context(Row(MODULE, row, {**common, "rank": rank}, environ=environ, preexec=pin(0)))
            for rank in range(size)
        ]
        try:
            for one in ranks:
                one.wait_until(READY)
            server.counted()
            node = stack.enter_context(Node([one.process.pid for one in ranks])) if samples_memory else None
            for one in ranks:
                one.go_on()
            for one in ranks:
                one.wait_until(MEASURED)
            memory, counted = node.finish() if node else {}, server.counted()
            for one in ranks:
                one.go_on()
            found = [one.result() for one in ranks]
        except RuntimeError as error:  # of one rank, perhaps only because another has failed
            raise RuntimeError("\n".join(str(one.failure()) for one in ranks if one.process.poll())) from error
    return {
        "wall_seconds": max(one["ended"] for one in found) - min(one["began"] for one in found),
        "cpu_seconds": sum(one["cpu_seconds"] for one in found),
        "peak_resident_bytes": sum(one["peak_extra_bytes"] for one in found),
        "arena_bytes": found[0].get("arena_bytes", 0),
        **counted,
        "served_ratio": counted["served_bytes"] / arguments["file_bytes"],
        **memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank, started by another benchmark.")
    parser.add_argument("--row", choices=list(ROWS), required=True)
    parser.add_argument("--arguments", type=json.loads, required=True)
    options = parser.parse_args()
    rank_row(options.row, options.arguments)


if __name__ == "__main__":
    main()
