"""Every fault we know, at every position: the parameters come out bit-exact, or one named error says why not.

``pytest tests/faults --fault-table FILE`` writes one JSON line for each cell.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

from streamer.config import StreamConfig
from streamer.sources import ObjectInfo, open_source
from tests.certificates import Certificates, make_certificates
from tests.faults.loading import (
    OBJECTS,
    Outcome,
    load_once,
    load_together,
    longest_seconds,
    new_server,
    ranges_of,
    server_context,
)
from tests.servers.faults import CATALOGUE, NamedFault, Where
from tests.servers.object_server import Fault, ObjectServer, Request, Response

POSITIONS = ("listing", "header", "first", "middle", "last")
PARTS = {"first byte": 0.0, "middle byte": 0.5, "last byte": 1.0}
MODES = ("trace", "eager")
_OTHER_BYTES = bytes(value ^ 1 for value in range(256))


@dataclass(frozen=True)
class Cell:
    fault: NamedFault
    position: str
    part: str
    mode: str
    transport: str = "native"
    together: bool = False

    @property
    def where(self) -> str:
        return f"{self.position}, {self.part}" if self.part else self.position

    @property
    def wanted(self) -> frozenset[str]:
        kinds = self.fault.in_listing if self.position == "listing" else self.fault.ends_in
        if self.transport == "sdk" and self.fault.in_sdk is not None:
            kinds = self.fault.in_sdk
        assert kinds is not None
        names = {kind.__name__ for kind in kinds}
        if not names or (self.transport == "sdk" and self.fault.sdk_may_survive):
            names.add("exact")
        return frozenset(names)

    @property
    def options(self) -> dict[str, object]:
        return {**self.fault.options, **({} if self.transport == "native" else {"transport": self.transport})}

    def __str__(self) -> str:
        native = f"{self.fault.name}-{self.where}-{self.mode}"
        if self.together:
            return f"{native}-together"
        return native if self.transport == "native" else f"{native}-{self.transport}"


def _cells() -> list[Cell]:
    found = []
    for fault, position, mode in itertools.product(CATALOGUE, POSITIONS, MODES):
        if position == "listing" and (fault.in_listing is None or mode == "eager"):
            continue  # modes differ after the listing
        if position == "first" and (fault.times is None or mode == "eager"):
            continue
        if position == "last" and fault.times is None and mode == "eager":
            continue
        # What strikes for ever strikes the rest of the body as well, so one byte says it all.
        every_byte = fault.in_body and fault.times and (mode == "trace" or position == "middle")
        parts = PARTS if every_byte else ["middle byte"] if fault.in_body else [""]
        found += [Cell(fault, position, part, mode) for part in parts]
    # The SDK has one column: of its own it has only the exchange, so neither mode nor position changes anything.
    return found + [
        Cell(fault, "middle", "middle byte" if fault.in_body else "", "trace", "sdk") for fault in CATALOGUE
    ]


CELLS = _cells()
#: What two ranks that share read is divided between them; each needs some of all that the other reads.
TOGETHER = [
    Cell(fault, position, "middle byte" if fault.in_body else "", "trace", together=True)
    for fault in CATALOGUE
    for position in (("header", "middle") if fault.times else ("middle",))
]
FOR_TWO_RANKS = [
    "500 once",
    "503 SlowDown in a burst",
    "403",
    "404",
    "expired token once",
    "connection refused for ever",
    "reset in the body once",
    "short body once",
    "stall in the body for ever",
    "200 for a range once",
    "wrong start and end once",
    "wrong start and end for ever",
    "other ETag for ever",
    "closed while idle",
]


@functools.cache
def _ranges(mode: str, rank: int, size: int, together: bool = False) -> list[tuple[str, int, int]]:
    found = ranges_of(mode, rank=rank, size=size, together=together)
    return [each for each in found if not each[0].endswith(".json")]


def _where(cell: Cell, untrusted: ssl.SSLContext | None = None, *, size: int = 1) -> Where:
    """The place of a cell, on the last rank: the reads of rank 0 hide what depends on offsets."""
    part = PARTS.get(cell.part, 0.5)
    if cell.position == "listing":
        return Where("LIST", part=part, untrusted=untrusted)
    ranges = _ranges(cell.mode, size - 1, size, cell.together)
    headers = [found for found in ranges if found[1] == 0]
    weights = [found for found in ranges if found[1] != 0]
    key, _, end = {
        "header": headers[-1],
        "first": weights[0],
        "middle": weights[len(weights) // 2],
        "last": weights[-1],
    }[cell.position]
    return Where("GET", key, end, part, untrusted)


@pytest.fixture(scope="session")
def untrusted(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    return server_context(make_certificates(tmp_path_factory.mktemp("untrusted")).server)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[list[dict[str, object]]]:
    """Collects the cells that were run."""
    rows: list[dict[str, object]] = []
    yield rows
    path = request.config.getoption("--fault-table")
    if path:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _record(table: list[dict[str, object]], cell: Cell, ranks: int, rank: int, outcome: Outcome) -> None:
    table.append(
        {
            "fault": cell.fault.name,
            "position": cell.where,
            "mode": cell.mode,
            "transport": cell.transport,
            "share": cell.together,
            "ranks": ranks,
            "rank": rank,
            "outcome": outcome.ended,
            "seconds": round(outcome.seconds, 3),
            "retries": outcome.retries,
        }
    )


def _judge(cell: Cell, outcome: Outcome) -> None:
    assert outcome.ended in cell.wanted, outcome
    assert outcome.seconds < longest_seconds(cell.fault.options, cell.fault.seconds), outcome
    if outcome.is_exact:
        assert outcome.seconds >= cell.fault.seconds, "the store's Retry-After was not honoured"
    # The SDK reads the listing, and nobody counts; aiohttp asks once more by itself when there was no answer.
    if outcome.is_exact and cell.position != "listing" and (cell.transport == "native" or cell.fault.in_body):
        assert outcome.retries is not None
        assert outcome.retries >= cell.fault.retries, "the report does not show the retries"
    if not outcome.is_exact:
        assert "s3://bucket/m" in outcome.text, "the message does not say where"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_fault_ends_in_exact_parameters_or_a_named_error(
    cell: Cell,
    certificates: Certificates,
    untrusted: ssl.SSLContext,
    table: list[dict[str, object]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tls = server_context(certificates.server) if cell.fault.name == "certificate not trusted" else None
    options = {**cell.options, **({"ca_bundle": str(certificates.authority)} if tls else {})}
    with new_server(tls) as server:
        cell.fault.install(server, _where(cell, untrusted))
        outcome = load_once(server.url, cell.mode, options)
        assert cell.fault.times is None or not server.faults[0].times, "the fault never struck"
    _record(table, cell, 1, 0, outcome)
    _judge(cell, outcome)
    assert not [record for record in caplog.records if record.name == "asyncio"], "the loop complained"


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[ProcessPoolExecutor]]:
    """Two processes, which live as long as this module's tests: importing torch takes longer than they do."""
    pools = [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in range(2)]
    yield pools
    for pool in pools:
        pool.shutdown()


def _load_rank(
    environ: dict[str, str],
    server_url: str,
    mode: str,
    options: Mapping[str, object],
    rank: int,
    items: Sequence[ObjectInfo] | None = None,
) -> Outcome:
    os.environ.update(environ)
    return load_once(server_url, mode, options, rank=rank, size=2, items=items)


def _two_ranks(server: ObjectServer, cell: Cell, ranks: list[ProcessPoolExecutor]) -> list[Outcome]:
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    running = [
        pool.submit(_load_rank, environ, server.url, cell.mode, cell.fault.options, rank)
        for rank, pool in enumerate(ranks)
    ]
    return [future.result(timeout=60) for future in running]


@pytest.mark.parametrize(
    "cell",
    [
        cell
        for cell in CELLS
        if cell.fault.name in FOR_TWO_RANKS
        and cell.transport == "native"
        and (cell.position, cell.mode) in (("header", "trace"), ("middle", "trace"), ("middle", "eager"))
        and cell.part in ("", "middle byte")
    ],
    ids=str,
)
def test_two_ranks_at_once(cell: Cell, ranks: list[ProcessPoolExecutor], table: list[dict[str, object]]) -> None:
    """Ranks share the store and nothing else: what strikes one must neither hurt the other nor hide."""
    with new_server() as server:
        cell.fault.install(server, _where(cell, size=2))
        outcomes = _two_ranks(server, cell, ranks)
    for rank, outcome in enumerate(outcomes):
        _record(table, cell, 2, rank, outcome)
    # A fault that strikes once strikes one rank; the other's reads may also avoid the struck byte altogether.
    for outcome in outcomes:
        if outcome.ended != "exact":
            _judge(cell, outcome)
    assert cell.wanted & {outcome.ended for outcome in outcomes}
    if cell.wanted == {"exact"}:
        assert sum(outcome.retries or 0 for outcome in outcomes) >= cell.fault.retries


@pytest.mark.parametrize("cell", TOGETHER, ids=str)
def test_ranks_that_share_end_alike(
    cell: Cell, certificates: Certificates, untrusted: ssl.SSLContext, table: list[dict[str, object]]
) -> None:
    """What strikes one rank's read strikes both ranks' model: both are exact, or both name it."""
    tls = server_context(certificates.server) if cell.fault.name == "certificate not trusted" else None
    options = {**cell.options, **({"ca_bundle": str(certificates.authority)} if tls else {})}
    with new_server(tls) as server:
        cell.fault.install(server, _where(cell, untrusted, size=2))
        outcomes = load_together(server.url, options)
        assert cell.fault.times is None or not server.faults[0].times, "the fault never struck"
    for rank, outcome in enumerate(outcomes):
        _record(table, cell, 2, rank, outcome)
        assert outcome.ended in cell.wanted, outcome
        assert outcome.seconds < longest_seconds(cell.fault.options, cell.fault.seconds + 2.0), outcome
        if not outcome.is_exact:
            assert "s3://bucket/m" in outcome.text, "the message does not say where"
    assert len({outcome.ended for outcome in outcomes}) == 1
    if cell.wanted == {"exact"}:
        assert sum(outcome.retries or 0 for outcome in outcomes) >= cell.fault.retries
    else:
        assert sum("on rank" in outcome.text for outcome in outcomes) in (0, 1)


def _trained_further(server: ObjectServer) -> None:
    """Replace the weights by others of the same shapes, as an upload of the next version does."""
    for key, content in OBJECTS.items():
        if key.endswith(".safetensors"):
            start = 8 + int.from_bytes(content[:8], "little")
            server.put("bucket", f"m/{key}", content[:start] + content[start:].translate(_OTHER_BYTES))


async def _list(endpoint: str, pin: str) -> Sequence[ObjectInfo]:
    source = open_source("s3://bucket/m", StreamConfig.resolve({"endpoint_url": endpoint, "pin": pin}))
    try:
        return await source.list()
    finally:
        await source.close()


@pytest.mark.parametrize("transport", ["native", "sdk"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pin", ["etag", "version"])
def test_ranks_that_share_pins_never_mix(pin: str, mode: str, transport: str, ranks: list[ProcessPoolExecutor]) -> None:
    """Everything is replaced while both load, and one comes later: all end with the old bytes, or with an error."""
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    options = {"pin": pin, "transport": transport}
    replaced: list[str] = []

    def replace(request: Request, response: Response) -> Response:
        _trained_further(server)
        replaced.append(request.key)
        return server.route(request)

    with new_server() as server:
        server.is_versioned = pin == "version"
        items = asyncio.run(_list(server.url, pin))
        key, _, end = _ranges(mode, 1, 2)[len(_ranges(mode, 1, 2)) // 2]
        server.faults = [Fault(replace, key=key, end=end)]
        load = functools.partial(_load_rank, environ, server.url, mode, options)
        running = [pool.submit(load, rank, items) for rank, pool in enumerate(ranks)]
        ended = [future.result(timeout=60).ended for future in running]
        assert replaced
        late = ranks[0].submit(load, 0, items).result(timeout=60).ended
        alone = ranks[0].submit(load, 0).result(timeout=60).ended
    if pin == "version":
        assert [*ended, late] == ["exact"] * 3
    else:
        assert set(ended) <= {"exact", "ObjectChangedError"}
        assert "ObjectChangedError" in ended
        assert late == "ObjectChangedError"
    assert alone == "wrong bytes", "without pins a rank loads what is there now, so this test can tell"


def test_no_cell_is_empty() -> None:
    names = [fault.name for fault in CATALOGUE]
    assert len(set(names)) == len(names)
    assert [cell.fault for cell in CELLS if cell.transport == "sdk"] == list(CATALOGUE)
    for fault, mode in itertools.product(CATALOGUE, MODES):
        positions = {
            cell.position for cell in CELLS if cell.fault is fault and cell.mode == mode and cell.transport == "native"
        }
        wanted = {"header", "middle"} | ({"last"} if mode == "trace" or fault.times else set())
        assert positions >= wanted, fault.name
    assert set(FOR_TWO_RANKS) <= set(names)
