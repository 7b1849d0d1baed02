"""``s3stream bench``: how fast this store is from this machine, and what that means for a load. Needs no torch."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from streamer.cli.measure import Grid, Measured, measure
from streamer.cli.output import DOLLARS_PER_REQUEST, Output, model_document, size_text
from streamer.config import StreamConfig
from streamer.plan.timing import predict_seconds
from streamer.transport.loop import LoopThread

__all__ = ["bench_document", "run_bench"]

MIB, GIB = 1 << 20, 1 << 30

#: Settings whose rate is this close to the highest are as good as it; the one with the fewest connections is best.
_AS_GOOD = 0.95


def run_bench(url: str, config: StreamConfig, grid: Grid, output: Output) -> None:
    """Print what was measured, the model that follows from it, and what that predicts."""
    configs = grid.configs(config)
    with LoopThread(use_uvloop=config.use_uvloop) as loop, output.progress("measuring") as progress:
        found = loop.run(measure(url, config, configs, grid, progress))
    document = bench_document(found)
    output.result(document, lambda console: _show(document, console))


def bench_document(found: Measured) -> dict[str, Any]:
    """Return what the command prints as JSON: what was measured, and what the model says of it and of a load."""
    model, checkpoint = found.model, found.checkpoint
    rows = []
    for run in found.runs:
        nbytes, predicted = sum(run.sizes), predict_seconds(run.sizes, run.config.concurrency, model)
        rows.append(
            {
                "concurrency": run.config.concurrency,
                "request_bytes": run.config.request_bytes,
                "seconds": round(run.seconds, 4),
                "predicted_seconds": round(predicted, 4),
                "prediction_error": round(predicted / run.seconds - 1, 3),
                "bytes": nbytes,
                "bytes_per_second": round(run.rate),
                "requests": run.requests,
                "retries": run.retries,
                "throttled": run.throttled,
                "hedges": run.hedges,
                "cpu_seconds_per_gib": round(run.cpu_seconds / (nbytes / GIB), 3),
            }
        )
    highest = max(run.rate for run in found.runs)
    best = min(
        (run for run in found.runs if run.rate >= _AS_GOOD * highest),
        key=lambda run: (run.config.concurrency, -run.rate),
    )
    whole = [
        min(best.config.request_bytes, file.size - start)
        for file in checkpoint.files
        for start in range(0, file.size, best.config.request_bytes)
    ]
    return {
        "url": checkpoint.url,
        "runs": rows,
        "best": rows[found.runs.index(best)],
        "model": model_document(model),
        "checkpoint_bytes": sum(whole),
        "load_seconds": round(predict_seconds(whole, best.config.concurrency, model), 3),
        "requests": found.requests,
        "bytes": found.nbytes,
        "request_cost_dollars": round(found.requests * DOLLARS_PER_REQUEST, 6)
        if checkpoint.url.startswith("s3://")
        else None,
    }


def _show(document: dict[str, Any], console: Console) -> None:
    console.print(document["url"], markup=False)
    table = Table(box=None, pad_edge=False)
    for title in ("at once", "request", "rate", "seconds", "predicted", "requests", "retries", "CPU/GiB"):
        table.add_column(title, justify="right")
    for row in document["runs"]:
        table.add_row(
            str(row["concurrency"]),
            size_text(row["request_bytes"]),
            f"{size_text(row['bytes_per_second'])}/s",
            f"{row['seconds']:.2f}",
            f"{row['predicted_seconds']:.2f} ({row['prediction_error']:+.0%})",
            str(row["requests"]),
            str(row["retries"]),
            f"{row['cpu_seconds_per_gib']:.2f} s",
        )
    console.print(table)
    throttled = sum(row["throttled"] for row in document["runs"])
    if throttled:
        console.print(f"\nthe store asked for fewer requests {throttled} times")
    model, best = document["model"], document["best"]
    console.print(
        f"\nthe first byte takes {model['first_byte_seconds'] * 1000:.1f} ms, a connection brings "
        f"{size_text(model['bytes_per_second_per_connection'])}/s, all together "
        f"{size_text(model['link_bytes_per_second'])}/s at most"
    )
    cost = document["request_cost_dollars"]
    price = "" if cost is None else f" (${cost} at the price of S3 Standard)"
    console.print(f"this took {document['requests']} requests{price} and {size_text(document['bytes'])}")
    console.print(
        f"the whole checkpoint's {size_text(document['checkpoint_bytes'])} would take about "
        f"{document['load_seconds']} s with\n"
        f"--option concurrency={best['concurrency']} --option request_bytes={_option_text(best['request_bytes'])}"
    )
    room = _option_text(best["concurrency"] * best["request_bytes"])
    console.print(f"for which each rank needs {room} of buffer_bytes, which ranks that share divide")


def _option_text(nbytes: int) -> str:
    return f"{nbytes // MIB}MiB" if nbytes % MIB == 0 else str(nbytes)
