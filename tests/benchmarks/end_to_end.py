"""From the object server into parameters: client CPU per GiB, wall time, memory.

``python -m tests.benchmarks.end_to_end`` writes a checkpoint, starts the object server in another
process, and runs each row in a fresh process, round by round, so that ratios are taken side by side.
Every row moves the same bytes into memory that was touched before the clock starts, after a warm-up
that loads a small checkpoint (imports and client set-up are paid there). Rows:

- ``s3stream``: `streamer.load` into the reference engine's Llama, traced, everything included.
- ``s3stream, rank 1 of 2``: the same for one rank; its row-parallel slices are staged and copied.
- ``bare protocol``: an asyncio.BufferedProtocol that does nothing but ranged GETs into memory.
- ``aiobotocore read()``: ``get_object`` and ``await body.read()``, copied into memory.
- ``s3stream, transport=sdk``: as the first, bodies through aiobotocore under our checks.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.rig import (
    GIB,
    RESULTS,
    emit,
    environment,
    llama_config,
    measure,
    medians,
    object_server,
    ratio,
    run_row,
    save,
    write_checkpoint,
)

RANGE_BYTES = 8 << 20
CONCURRENCY = 16
LAYERS = 44  # 6 GiB; the machine needs three times that, most of it for checking the result


def large_config(layers: int) -> dict[str, Any]:
    return llama_config(layers=layers, hidden=2560, wide=6912, heads=20, kv_heads=4, vocabulary=32000)


SMALL = llama_config(layers=1, hidden=128, wide=256, heads=4, kv_heads=2, vocabulary=256)

ROWS = ["s3stream", "s3stream, rank 1 of 2", "bare protocol", "aiobotocore read()", "s3stream, transport=sdk"]


def streamer_row(arguments: dict[str, Any], *, transport: str = "native", rank: int = 0, size: int = 1) -> None:
    import streamer
    from streamer.reference.config import LlamaConfig
    from streamer.reference.engine import build_llama
    from streamer.reference.parallel import Parallel

    options = {
        "endpoint_url": arguments["endpoint"],
        "transport": transport,
        "concurrency": CONCURRENCY,
        "request_bytes": RANGE_BYTES,
        **arguments.get("options", {}),
    }

    def model_of(config: dict[str, Any]) -> Any:
        model = build_llama(LlamaConfig.from_dict(config), Parallel(rank, size), load_device="cpu")
        model.load_weights([])  # gives the parameters their memory
        for parameter in model.parameters():
            parameter.fill_(1)
        return model

    streamer.load(model_of(SMALL), "s3://bench/small", options)
    model = model_of(arguments["config"])
    reports = []

    def work() -> int:
        reports.append(streamer.load(model, "s3://bench/large", options))
        return reports[0].fetched_bytes

    sample = measure(work)
    report = reports[0]
    _verify(model, Path(arguments["file"]), rank, size)
    emit(
        sample,
        requests=report.requests,
        retries=report.retries,
        needed_bytes=report.needed_bytes,
        peak_buffer_bytes=report.peak_buffer_bytes,
        times=report.to_dict()["times"],
    )


def _verify(model: Any, file: Path, rank: int, size: int) -> None:
    """Compare every parameter with the file, read by safetensors itself."""
    import torch
    from safetensors import safe_open

    from streamer.reference.engine import build_llama
    from streamer.reference.parallel import Parallel

    expected = build_llama(model.config, Parallel(rank, size), load_device="cpu")
    with safe_open(file, "pt") as opened:
        expected.load_weights((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16)), f"{name} is wrong"


def _destination(size: int) -> memoryview:
    buffer = (ctypes.c_char * size)()
    ctypes.memset(buffer, 1, size)
    return memoryview(buffer).cast("B")


def aiobotocore_row(arguments: dict[str, Any]) -> None:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    async def read_all(key: str, size: int, target: memoryview) -> int:
        config = AioConfig(max_pool_connections=CONCURRENCY, signature_version="s3v4")
        async with get_session().create_client("s3", endpoint_url=arguments["endpoint"], config=config) as client:
            gate = asyncio.Semaphore(CONCURRENCY)

            async def one(start: int) -> None:
                end = min(size, start + RANGE_BYTES)
                async with gate:
                    response = await client.get_object(Bucket="bench", Key=key, Range=f"bytes={start}-{end - 1}")
                    async with response["Body"] as body:
                        target[start:end] = await body.read()

            await asyncio.gather(*(one(start) for start in range(0, size, RANGE_BYTES)))
        return size

    _flat_row(arguments, read_all)


def bare_row(arguments: dict[str, Any]) -> None:
    host, _, port = arguments["endpoint"].removeprefix("http://").partition(":")

    async def read_all(key: str, size: int, target: memoryview) -> int:
        loop = asyncio.get_running_loop()
        starts = iter(range(0, size, RANGE_BYTES))

        async def work() -> None:
            _, protocol = await loop.create_connection(BareProtocol, host, int(port))
            for start in starts:
                end = min(size, start + RANGE_BYTES)
                await protocol.get(f"/bench/{key}", start, target[start:end])
            protocol.transport.close()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        return size

    _flat_row(arguments, read_all)


class BareProtocol(asyncio.BufferedProtocol):
    """The least that receives a ranged GET into memory: no checks, no retries, no timeouts."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._scratch = memoryview(bytearray(16384))
        self._target: memoryview | None = None
        self._head = b""
        self._in_body = False

    async def get(self, path: str, start: int, target: memoryview) -> None:
        self._done = asyncio.get_running_loop().create_future()
        self._target, self._head, self._in_body = target, b"", False
        end = start + len(target) - 1
        self.transport.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nRange: bytes={start}-{end}\r\n\r\n".encode())
        await self._done

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target if self._in_body and self._target is not None else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        assert self._target is not None
        if self._in_body:
            self._target = self._target[nbytes:]
        else:
            self._head += bytes(self._scratch[:nbytes])
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            assert self._head.startswith(b"HTTP/1.1 206")
            rest = self._head[end + 4 :]
            self._target[: len(rest)] = rest
            self._target, self._in_body = self._target[len(rest) :], True
        if not len(self._target):
            self._in_body = False
            self._done.set_result(None)


def _flat_row(arguments: dict[str, Any], read_all: Callable[[str, int, memoryview], Any]) -> None:
    """Measure a client that reads the whole file into flat memory, and compare it with the file."""
    small = Path(arguments["file"]).parent.parent / "small" / "model.safetensors"
    asyncio.run(read_all("small/model.safetensors", small.stat().st_size, _destination(small.stat().st_size)))
    file = Path(arguments["file"])
    size = file.stat().st_size
    target = _destination(size)
    sample = measure(lambda: asyncio.run(read_all("large/model.safetensors", size, target)))
    with file.open("rb") as opened:
        for start in range(0, size, 64 << 20):
            assert opened.read(64 << 20) == target[start : start + (64 << 20)], f"wrong bytes after {start}"
    emit(sample)


def run(rounds: int, layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root = Path(folder)
        nbytes = write_checkpoint(root / "bench" / "large", large_config(layers))
        write_checkpoint(root / "bench" / "small", SMALL)
        results: list[dict[str, dict[str, Any]]] = []
        with object_server(root) as endpoint:
            file = str(root / "bench" / "large" / "model.safetensors")
            arguments = {"endpoint": endpoint, "config": large_config(layers), "file": file}
            for number in range(rounds):
                order = ROWS if number % 2 == 0 else ROWS[::-1]
                results.append({row: run_row("tests.benchmarks.end_to_end", row, arguments) for row in order})
                print(f"round {number + 1} of {rounds} done", flush=True)
    return {
        "what": "client CPU and wall time from the object server into parameters, plain HTTP on loopback",
        "environment": environment(),
        "checkpoint_bytes": nbytes,
        "range_bytes": RANGE_BYTES,
        "concurrency": CONCURRENCY,
        "median_cpu_seconds_per_gib": {row: round(medians(results, row, "cpu_per_gib"), 3) for row in ROWS},
        "median_wall_seconds": {row: round(medians(results, row, "wall_seconds"), 3) for row in ROWS},
        "median_peak_extra_mib": {row: round(medians(results, row, "peak_extra_bytes") / (1 << 20)) for row in ROWS},
        "cpu_ratio_to_bare_protocol": {row: ratio(results, row, "bare protocol", "cpu_per_gib") for row in ROWS},
        "cpu_ratio_to_aiobotocore_read": {
            row: ratio(results, row, "aiobotocore read()", "cpu_per_gib") for row in ROWS
        },
        "rounds": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="size of the checkpoint, 140 MB a layer")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows: dict[str, Callable[[dict[str, Any]], None]] = {
        "s3stream": streamer_row,
        "s3stream, rank 1 of 2": lambda arguments: streamer_row(arguments, rank=1, size=2),
        "bare protocol": bare_row,
        "aiobotocore read()": aiobotocore_row,
        "s3stream, transport=sdk": lambda arguments: streamer_row(arguments, transport="sdk"),
    }
    if options.row:
        rows[options.row](options.arguments)
        return
    document = run(options.rounds, options.layers)
    path = save("end_to_end", document, options.results)
    print(f"\n{document['checkpoint_bytes'] / GIB:.2f} GiB, medians of {options.rounds} rounds\n")
    print("| client | CPU s/GiB | to bare protocol | to aiobotocore read() | wall s | extra MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in ROWS:
        print(
            f"| {row} | {document['median_cpu_seconds_per_gib'][row]:.2f} "
            f"| {document['cpu_ratio_to_bare_protocol'][row]['median']:.2f} "
            f"| {document['cpu_ratio_to_aiobotocore_read'][row]['median']:.2f} "
            f"| {document['median_wall_seconds'][row]:.2f} | {document['median_peak_extra_mib'][row]} |"
        )
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
