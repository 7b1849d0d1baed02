"""Ranks of one machine loading one checkpoint: what is fetched, how long it takes, what memory it needs.

``python -m tests.benchmarks.sharing`` writes a Llama checkpoint and starts the object server in another process: plain
HTTP as fast as it goes, and ``s3like``, with 30 ms to the first byte and 90 MB/s per connection. For each number of
ranks, each row starts that many processes in a gloo group, on all processors but the server's, round by round, so that
ratios are taken side by side. Every rank builds its model, touches its parameters and loads a small checkpoint first.
The clock runs from a barrier after that until the slowest rank has its own slices in its parameters, which are then
compared with the file. Requests and bytes are counted by the server. Rows:

- ``share=auto``, ``share=off``: `streamer.load` with a group, 512 MiB of `buffer_bytes`, which
  all ranks have together when they share, and each has when they do not.
- ``Run:ai``: every rank streams all tensors and takes its slices, as vLLM does by default; ``Run:ai, distributed``:
  each reads a part and broadcasts it (``RUNAI_STREAMER_DIST=1``, for it does so over nccl only, unless told).
  ``limited``: given as much memory as sharing ranks have, for the node in distributed mode, else for each rank a part.

Memory is measured in a round of its own, for sampling takes processor time from the ranks. ``peak_node_bytes``: the
highest sum of the ranks' proportional set sizes, which count shared memory once, less that before the load; files are
left out, and a peak between two samples is missed. ``peak_resident_bytes`` misses none: the sum of what each rank's
highest resident size was beyond that before the load. It counts shared memory once per rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import runai
from tests.benchmarks.processes import (
    MEASURED,
    READY,
    STORES,
    Row,
    Served,
    emit,
    measure,
    object_server,
    pin,
    require,
    store_options,
)
from tests.benchmarks.rig import (
    GIB,
    RESULTS,
    environment,
    llama_config,
    medians,
    ratio,
    save,
    spread,
    write_checkpoint,
)

MIB = 1 << 20
LAYERS = 16  # 2.1 GiB
SMALL = llama_config(layers=1, hidden=256, wide=256, heads=8, kv_heads=8, vocabulary=256)
MODULE, BASE = "tests.benchmarks.sharing", "share=auto"
BUFFER_BYTES = 512 * MIB
_SAMPLE_SECONDS = 0.01
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

    def environ(self, ranks: int) -> dict[str, str]:
        if self.share:
            return {}
        found = {"RUNAI_STREAMER_DIST": "1"} if self.is_distributed else {}
        if self.is_limited:
            limit = BUFFER_BYTES if self.is_distributed else BUFFER_BYTES // ranks
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


def sized_config(layers: int) -> dict[str, Any]:
    return llama_config(layers=layers, hidden=2048, wide=8192, heads=16, kv_heads=8, vocabulary=16000)


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
    options = {"endpoint_url": arguments["endpoint"], "share": way.share, "buffer_bytes": BUFFER_BYTES}
    report = streamer.load(model, url, options, group=dist.group.WORLD)
    together = report.sharing.ranks if report.sharing else 1
    if together != (size if way.share == "auto" else 1):
        raise RuntimeError(f"{together} of {size} ranks shared under share={way.share}")
    arena = report.sharing.arena_bytes if report.sharing else 0
    return {"nbytes": report.fetched_bytes, "arena_bytes": arena, "peak_buffer_bytes": report.peak_buffer_bytes}


class Node:
    """Samples the memory of some processes together, while it is entered."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._before = self._peak = self._now()
        self._samples = 0

    def __enter__(self) -> Node:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def finish(self) -> dict[str, int]:
        """End and return the highest sample, less that at the beginning."""
        self._ending.set()
        self._thread.join()
        return {"peak_node_bytes": self._peak - self._before, "samples": self._samples}

    def _sample(self) -> None:
        while not self._ending.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, self._now())
            self._samples += 1

    def _now(self) -> int:
        return sum(map(_proportional_bytes, self._pids))


def _proportional_bytes(pid: int) -> int:
    """A process's Pss: each page divided by how many processes map it (man 5 proc_pid_smaps).

    Pages of files are left out: how many other programs use the same libraries changes all the time.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = dict(line.split()[:2] for line in lines[1:])
    return (int(found["Pss_Anon:"]) + int(found["Pss_Shmem:"])) << 10  # Linux 5.9 and later


def run_ranks(
    row: str, size: int, arguments: Mapping[str, Any], server: Served, *, samples_memory: bool = False
) -> dict[str, Any]:
    """Start the ranks of one row, have them load together, and put together what they say."""
    environ = {
        **ROWS[row].environ(size),
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


def run(
    rows: Sequence[str],
    sizes: Sequence[int],
    stores: Sequence[str],
    *,
    runai_sizes: Sequence[int],
    rounds: int,
    layers: int,
) -> dict[str, Any]:
    config, settings = sized_config(layers), {}
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        write_checkpoint(root / "bench" / "large", config)
        write_checkpoint(root / "bench" / "small", SMALL)
        file = root / "bench" / "large" / "model.safetensors"
        arguments = {"config": config, "file": str(file), "file_bytes": file.stat().st_size}
        for store in stores:
            with object_server(root, *store_options(store)) as server:
                for size in sizes:
                    chosen = [row for row in rows if ROWS[row].share or size in runai_sizes]
                    results = []
                    for number in range(rounds):
                        order = chosen if number % 2 == 0 else chosen[::-1]
                        results.append({row: run_ranks(row, size, arguments, server) for row in order})
                        print(f"{store}, {size} ranks: round {number + 1} of {rounds} done", flush=True)
                    memory = {row: run_ranks(row, size, arguments, server, samples_memory=True) for row in chosen}
                    settings[f"{store}, {size} ranks"] = _summary(chosen, results, memory)
    packages = runai.PACKAGES if any(not ROWS[row].share for row in rows) else ()
    return {
        "what": "ranks of one machine loading one checkpoint over loopback",
        "environment": environment(*packages),
        "checkpoint_bytes": arguments["file_bytes"],
        "buffer_bytes": BUFFER_BYTES,
        "stores": {store: STORES[store] for store in stores},
        "settings": settings,
    }


def _summary(
    rows: Sequence[str], results: Sequence[Mapping[str, Any]], memory: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "median_wall_seconds": {row: round(medians(results, row, "wall_seconds"), 3) for row in rows},
        "median_cpu_seconds": {row: round(medians(results, row, "cpu_seconds"), 3) for row in rows},
        "median_served_ratio": {row: round(medians(results, row, "served_ratio"), 4) for row in rows},
        "median_requests": {row: medians(results, row, "requests") for row in rows},
        "peak_node_mib": {row: round(memory[row]["peak_node_bytes"] / MIB) for row in rows},
        "peak_resident_mib": {row: round(memory[row]["peak_resident_bytes"] / MIB) for row in rows},
        "wall_ratio_to_share_auto": {row: ratio(results, row, BASE, "wall_seconds") for row in rows},
        "cpu_ratio_to_share_auto": {row: ratio(results, row, BASE, "cpu_seconds") for row in rows},
        "served_ratio_to_share_auto": {row: ratio(results, row, BASE, "served_bytes") for row in rows},
        "rounds": results,
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="size of the checkpoint, 126 MB a layer")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8], metavar="RANKS")
    parser.add_argument("--runai-sizes", type=int, nargs="+", default=[2], metavar="RANKS", help="with Run:ai's rows")
    parser.add_argument("--stores", nargs="+", choices=list(STORES), default=list(STORES))
    parser.add_argument(
        "--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="; ".join(ROWS)
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        rank_row(options.row, options.arguments)
        return
    rows = [row for row in ROWS if row == BASE or row in options.only]
    if any(not ROWS[row].share for row in rows):
        if min(options.runai_sizes) < 2:
            parser.error("--runai-sizes: there is nothing to distribute over one rank")
        require(runai.PACKAGES, "Run:ai's rows")
    document = run(
        rows,
        options.sizes,
        options.stores,
        runai_sizes=options.runai_sizes,
        rounds=options.rounds,
        layers=options.layers,
    )
    path = save("sharing", document, options.results)
    print(f"\n{document['checkpoint_bytes'] / GIB:.2f} GiB, medians of {options.rounds} rounds; ratios to {BASE}\n")
    print("| ranks load | wall s | ratio (min-max) | CPU s | ratio (min-max) | bytes served | requests | node MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, found in document["settings"].items():
        for row in found["median_wall_seconds"]:
            print(
                f"| {name}: {row} | {found['median_wall_seconds'][row]:.2f} "
                f"| {spread(found['wall_ratio_to_share_auto'][row])} | {found['median_cpu_seconds'][row]:.2f} "
                f"| {spread(found['cpu_ratio_to_share_auto'][row])} | {found['median_served_ratio'][row]:.3f} "
                f"| {found['median_requests'][row]:.0f} | {found['peak_node_mib'][row]} |"
            )
    print(f"\nbuffer_bytes: {BUFFER_BYTES // MIB} MiB; raw results: {path}")


if __name__ == "__main__":
    main()
