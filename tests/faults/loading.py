"""A tiny checkpoint of two files and an index, a model of two ranks for it, and one load of it, judged."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

import streamer
from streamer import errors
from streamer.config import StreamConfig
from streamer.errors import StreamError
from streamer.share.group import Group
from streamer.sources import ObjectInfo, open_source
from streamer.sources.pinned import PinnedSource
from tests.conftest import SECRET_KEY
from tests.servers.object_server import ObjectServer
from tests.share.together import Meeting, ThreadGroup

__all__ = [
    "OBJECTS",
    "OPTIONS",
    "Outcome",
    "load_once",
    "load_together",
    "longest_seconds",
    "new_server",
    "ranges_of",
    "server_context",
]

#: For each file its tensors: shape, dtype, and the dimension that ranks share out (None: every rank has all).
FILES: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype, int | None]]] = {
    "model-00001-of-00002.safetensors": {
        "a.norm": ((2048,), torch.bfloat16, None),
        "a.rows": ((320, 512), torch.bfloat16, 0),
        "a.columns": ((320, 512), torch.bfloat16, 1),
    },
    "model-00002-of-00002.safetensors": {
        "b.cast": ((160, 512), torch.float32, 0),  # the model holds it in bf16, so it is staged
        "b.rows": ((320, 512), torch.bfloat16, 0),
        "b.tail": ((60_000,), torch.uint8, None),
    },
}
KINDS = {name: spec for file in FILES.values() for name, spec in file.items()}

OPTIONS: dict[str, object] = {
    "request_bytes": 128 << 10,
    "header_read_bytes": 4096,
    "coalesce_gap_bytes": 8192,
    "concurrency": 4,
    "retry_attempts": 3,
    "retry_first_wait_seconds": 0.01,
    "retry_longest_wait_seconds": 0.05,
    "retry_deadline_seconds": 5.0,
    "connect_timeout_seconds": 2.0,
    "idle_timeout_seconds": 0.3,
    "min_rate_bytes_per_second": 100_000,
}
#: What a response may take beyond the idle timeout, see `streamer.transport.connection`.
_GRACE_SECONDS = 0.5


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name, (shape, dtype, _) in KINDS.items():
        values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        state[name] = values if dtype == torch.uint8 else (values.float() / 7 + 1).to(dtype)
    return state


STATE = _state()


def _objects() -> dict[str, bytes]:
    found = {file: safetensors.torch.save({name: STATE[name] for name in names}) for file, names in FILES.items()}
    total = sum(map(len, found.values()))
    where = {name: file for file, names in FILES.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    return {**found, "model.safetensors.index.json": json.dumps(index).encode()}


OBJECTS = _objects()


class Model(torch.nn.Module):
    """One rank's part, under the tensors' own names."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self._rank, self._size = rank, size
        self.parameters_by_name = {}
        for name, (shape, dtype, dim) in KINDS.items():
            own = list(shape)
            if dim is not None:
                own[dim] //= size
            held = torch.bfloat16 if dtype == torch.float32 else dtype
            parameter = torch.nn.Parameter(torch.full(own, 3, dtype=held), requires_grad=False)
            self.register_parameter(name.replace(".", "_"), parameter)
            self.parameters_by_name[name] = parameter

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            dim = KINDS[name][2]
            if dim is not None:
                length = tensor.shape[dim] // self._size
                tensor = tensor.narrow(dim, self._rank * length, length)
            self.parameters_by_name[name].copy_(tensor)
        return {name for name, _ in self.named_parameters()}


@dataclass(frozen=True)
class Outcome:
    """How a load ended.

    Attributes:
        ended: ``exact``, ``wrong bytes``, or the class of the error.
        text: of the error.
        retries: from the report; None when there is none.
        elapsed_seconds: what the error says it took to give up.
    """

    ended: str
    seconds: float
    retries: int | None = None
    text: str = ""
    elapsed_seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.ended == "exact"


def load_once(
    endpoint: str,
    mode: str,
    options: Mapping[str, object] | None = None,
    *,
    rank: int = 0,
    size: int = 1,
    url: str = "s3://bucket/m",
    items: Sequence[ObjectInfo] | None = None,
    group: Group | None = None,
) -> Outcome:
    """Load, compare every parameter bit by bit, and say how it ended. Errors that are not ours are not caught.

    Args:
        items: as another process listed them; nothing is listed then.
        group: the ranks to load together with.
    """
    model = Model(rank, size)
    config = StreamConfig.resolve({**OPTIONS, "endpoint_url": endpoint, "mode": mode, **(options or {})})
    source = url if items is None else PinnedSource(open_source(url, config), items)
    began = time.monotonic()
    try:
        report = streamer.load(model, source, config, group=group)
    except StreamError as error:
        text = str(error)
        assert SECRET_KEY not in text, "a message holds the secret key"
        assert "X-Amz-" not in text, "a message holds a signed URL"
        elapsed = getattr(error, "elapsed_seconds", 0.0)
        return Outcome(_nameable(error), time.monotonic() - began, text=text, elapsed_seconds=elapsed)
    seconds = time.monotonic() - began
    expected = Model(rank, size)
    expected.load_weights(STATE.items())
    same = all(
        torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True)
    )
    return Outcome("exact" if same else "wrong bytes", seconds, report.retries)


def load_together(endpoint: str, options: Mapping[str, object] | None = None, *, size: int = 2) -> list[Outcome]:
    """Load on ranks that share what they read, as threads; see `load_once`."""
    meeting = Meeting(size)
    options = {"share": "require", "share_timeout_seconds": 30.0, **(options or {})}
    with ThreadPoolExecutor(size) as threads:
        running = [
            threads.submit(
                load_once, endpoint, "trace", options, rank=rank, size=size, group=ThreadGroup(rank, meeting)
            )
            for rank in range(size)
        ]
        return [future.result(timeout=120) for future in running]


def _nameable(error: StreamError) -> str:
    """The class that users can name: the nearest one in `streamer.errors`."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)


def longest_seconds(options: Mapping[str, object], extra: float = 0.0) -> float:
    """How long one range may take, by the configuration, until it is there or given up; plus the load itself.

    Each try may wait for a connection, then for the idle timeout and its grace; between tries are the waits.
    """
    config = StreamConfig.resolve({**OPTIONS, **options})
    one_try = config.idle_timeout_seconds + _GRACE_SECONDS + config.retry_longest_wait_seconds
    return min(config.retry_attempts * one_try, config.retry_deadline_seconds + one_try) + extra + 1.5


@contextlib.contextmanager
def new_server(tls: ssl.SSLContext | None = None) -> Iterator[ObjectServer]:
    with ObjectServer(tls=tls) as server:
        for key, content in OBJECTS.items():
            server.put("bucket", f"m/{key}", content)
        yield server


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def ranges_of(mode: str, *, rank: int = 0, size: int = 1, together: bool = False) -> list[tuple[str, int, int]]:
    """The ranged reads of a load in good health, by file and position: ``(key, start, end)``.

    Args:
        together: of all ranks, which share.
    """
    with new_server() as server:
        if together:
            outcomes = load_together(server.url, size=size)
        else:
            outcomes = [load_once(server.url, mode, rank=rank, size=size)]
        assert {(outcome.ended, outcome.retries) for outcome in outcomes} == {("exact", 0)}, outcomes
        return sorted(server.counters.ranges)
