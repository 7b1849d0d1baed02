"""Several ranks of one model at once, each in a process of its own, over a real process group.

vLLM's groups are pretended in each of them, as everywhere here, but for what lies beneath: what vLLM and our loader
send through ``torch.distributed`` reaches the other ranks.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from streamer.fetch.engine import FetchEngine
from streamer.fetch.fill import CopyJob, demand_of
from streamer.plan.geometry import runs
from streamer.report import LoadReport
from streamer.share.sharing import Sharing
from tests.tensors import differences, tensors_of
from tests.vllm.case import Case, Checkpoint
from tests.vllm.cpu import allow_gated_layers
from tests.vllm.host import build, finalize, loading
from vllm_s3stream import parallel, register

__all__ = ["Rank", "RankFailedError", "Spans", "load_on_ranks", "union"]

#: Of one rank: ``(file, start, end)``, half open.
Spans = list[tuple[int, int, int]]

_SECONDS = 120.0
#: Imported once; ranks are forked from the process that did.
_PRELOADED = (
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe",
    "vllm_s3stream.loader",
    "aiobotocore.session",
    "tests.vllm.ranks",
)


@dataclass(frozen=True, slots=True)
class Rank:
    """What became of one rank, which loaded twice: alone from the folder, then together from the store.

    Attributes:
        needed: the bytes that its copies took when it was alone, each a span of its own.
        different: names of tensors that the two loads did not give the same.
        shared_fills: copies in each fill that was shared, in order.
        own_fills: how many were not.
    """

    needed: Spans
    alone: LoadReport
    together: LoadReport
    different: list[str]
    shared_fills: list[int] = field(default_factory=list)
    own_fills: int = 0


class RankFailedError(Exception):
    """A rank raised, ended, or took too long."""


@dataclass(frozen=True, slots=True)
class _Job:
    case: Case
    folder: Path
    pulled: Path
    options: Mapping[str, Any]
    rank: int
    size: int
    meeting_place: str
    environment: Mapping[str, str]


def load_on_ranks(case: Case, folder: Path, pulled: Path, size: int, **options: Any) -> list[Rank]:
    """Load `case` on `size` ranks; return what became of each.

    Each signs its requests with an access key of its own, ``RANK`` and its number.

    Args:
        pulled: folder that stands for the same checkpoint in a store.
        options: of all loads.

    Raises:
        RankFailedError: one did, with its traceback, or did not end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "S3STREAM_", "VLLM_"))}
    written = dataclasses.replace(case, make=_make_nothing, order=None)  # functions that made it cannot be sent
    ends: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as meeting:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            own = {**environment, "AWS_ACCESS_KEY_ID": f"RANK{rank}"}
            job = _Job(written, folder, pulled, options, rank, size, f"file://{meeting}/store", own)
            process = context.Process(target=_work, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for end in ends:
                end.close()


def _make_nothing() -> Checkpoint:
    raise AssertionError("the checkpoint has been written")


def _collect(ends: Sequence[Connection]) -> list[Rank]:
    answers: dict[int, Rank] = {}
    deadline = time.monotonic() + _SECONDS
    while len(answers) < len(ends):
        open_ends = [end for number, end in enumerate(ends) if number not in answers]
        ready = wait(open_ends, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"after {_SECONDS:g} s, only ranks {sorted(answers)} of {len(ends)} are done")
        for end in ready:
            number = ends.index(end)
            try:
                answer = ends[number].recv()
            except EOFError:
                raise RankFailedError(f"rank {number} ended without a word") from None
            if not isinstance(answer, Rank):
                raise RankFailedError(f"rank {number}:\n{answer}")
            answers[number] = answer
    return [answers[number] for number in range(len(ends))]


def _work(job: _Job, results: Connection) -> None:
    try:
        os.environ.update(job.environment)
        results.send(_load_twice(job))
    except BaseException:
        results.send(traceback.format_exc())


def _load_twice(job: _Job) -> Rank:
    torch.set_num_threads(1)
    allow_gated_layers()
    register()
    dist.init_process_group("gloo", init_method=job.meeting_place, rank=job.rank, world_size=job.size)
    for name in ("cpu_group", "device_group"):
        setattr(parallel._Group, name, property(_really))
    fills = _Fills()
    expected, alone = _load(job, job.folder, share="off")
    assert not fills.shared
    needed = fills.start_again()
    found, together = _load(job, job.pulled, share="require")
    different = differences(expected, found)
    dist.barrier()  # nobody is missed by the others
    return Rank(needed, alone, together, different, fills.shared, fills.own)


def _really(group: Any) -> Any:
    return dist.group.WORLD if group.world_size > 1 else parallel._ProcessGroup(group.ranks, 0)


def _load(job: _Job, folder: Path, *, share: str) -> tuple[dict[str, torch.Tensor], LoadReport]:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(
        LoadConfig(
            load_format="s3stream",
            use_tqdm_on_load=False,
            model_loader_extra_config={**job.options, "share": share},
        )
    )
    built = build(folder, job.case, tensor=job.size, rank=job.rank)
    with loading(built):
        loader.load_weights(built.model, built.model_config)
    finalize(built)
    return tensors_of(built.model), loader.report


class _Fills:
    """Watches all fills of this process."""

    def __init__(self) -> None:
        self.needed: Spans = []
        self.shared: list[int] = []
        self.own = 0
        own, shared = FetchEngine.fill, Sharing.fill

        def fill_alone(engine: FetchEngine, jobs: Sequence[CopyJob], *rest: Any) -> Any:
            self.own += 1
            for job in jobs:
                demand = demand_of(job)
                self.needed += [(demand.file, *run) for run in runs(demand.view, 0)]
            return own(engine, jobs, *rest)

        def fill_together(sharing: Sharing, jobs: Sequence[CopyJob], *rest: Any) -> Any:
            filled = shared(sharing, jobs, *rest)
            if filled is not None:
                self.shared.append(len(jobs))
            return filled

        engines: Any = FetchEngine
        engines.fill = fill_alone
        sharings: Any = Sharing
        sharings.fill = fill_together

    def start_again(self) -> Spans:
        """Forget what was seen; return what was needed."""
        needed, self.needed, self.shared, self.own = self.needed, [], [], 0
        return needed


def union(spans: Sequence[Spans]) -> int:
    """Return how many bytes are in any of `spans`."""
    total, file, reached = 0, -1, 0
    for at_file, start, end in sorted(span for each in spans for span in each):
        if at_file != file:
            file, reached = at_file, 0
        total += max(0, end - max(start, reached))
        reached = max(end, reached)
    return total
