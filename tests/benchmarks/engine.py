"""The real engine: vLLM on CPU, loading one checkpoint in the ways that it offers.

``python -m tests.benchmarks.engine``, in an environment with vLLM for CPUs and the packages of Run:ai, writes a Llama
in bf16, starts the object server in another process (30 ms to the first byte, 90 MB/s per connection), and has vLLM
make an engine of the checkpoint, for each row in a fresh process, round by round, so that ratios are taken side by
side. The engine runs in that process, on the last processor; its parameters are touched when the model has been built.
What is measured is the loader's ``load_weights``, everything included, and nothing is warmed up, as in any start.
Where the loader logs "Loading weights took", that is kept too; Run:ai's in vLLM does not. In each round all rows must
give the same parameters, byte for byte. Rows:

- ``s3stream``: ``load_format="s3stream"``, from the store.
- ``Run:ai``: ``load_format="runai_streamer"``, from the store. By default it takes up to 40 GB of memory of its own;
  ``Run:ai, limited``: half of the checkpoint.
- ``default, from disk``: vLLM's own loader, from the same files on this machine, all of them in the page cache. It
  maps them, so the pages count as memory of the process, though the kernel can take them back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.benchmarks import runai
from tests.benchmarks.processes import STORES, Sample, emit, measure, object_server, require, run_row, store_options
from tests.benchmarks.rig import GIB, RESULTS, environment, llama_config, medians, ratio, save, spread, write_checkpoint

MODULE, BASE = "tests.benchmarks.engine", "s3stream"
MIB = 1 << 20
LAYERS = 6  # 0.8 GB
_TOOK = re.compile(r"^Loading weights took ([0-9.]+) seconds")


@dataclass(frozen=True)
class Way:
    """One row.

    Attributes:
        load_format: vLLM's name of it.
        is_local: it reads the folder, not the store.
        packages: that must be installed.
        limit: memory that Run:ai may take, as a part of the checkpoint.
    """

    load_format: str
    is_local: bool = False
    packages: Sequence[str] = field(default=())
    limit: float | None = None

    def extra_config(self, nbytes: int) -> dict[str, Any]:
        return {} if self.limit is None else {"memory_limit": int(nbytes * self.limit)}


ROWS = {
    BASE: Way("s3stream"),
    "Run:ai": Way("runai_streamer", packages=runai.PACKAGES),
    "Run:ai, limited": Way("runai_streamer", packages=runai.PACKAGES, limit=0.5),
    "default, from disk": Way("safetensors", is_local=True),
}


def engine_config(layers: int) -> dict[str, Any]:
    return {
        **llama_config(layers, hidden=2048, wide=5632, heads=16, kv_heads=4, vocabulary=32000),
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


@contextlib.contextmanager
def _loaders_measured(found: dict[str, Any]) -> Iterator[None]:
    """Put into `found` what the first load of vLLM takes while this is entered."""
    from vllm.model_executor import model_loader

    get_loader = model_loader.get_model_loader

    def get(load_config: Any) -> Any:
        loader = get_loader(load_config)
        load_weights = loader.load_weights

        def measured(model: Any, model_config: Any) -> None:
            for parameter in model.parameters():
                parameter.data.fill_(1)
            nbytes = sum(int(parameter.nbytes) for parameter in model.parameters())

            def work() -> int:
                load_weights(model, model_config)
                return nbytes

            log = _Log()
            # Not earlier: vLLM configures its loggers again on its way here, which drops their handlers.
            logging.getLogger("vllm.model_executor.model_loader.default_loader").addHandler(log)
            found["loader"] = type(loader).__name__
            found["sample"] = measure(work)
            found["logged_seconds"] = log.seconds
            found["digest"] = digest(model.named_parameters())

        loader.load_weights = measured
        return loader

    with mock.patch.object(model_loader, "get_model_loader", get):
        yield


def digest(parameters: Iterator[tuple[str, Any]]) -> str:
    """Return a digest of names, shapes and bytes."""
    import hashlib

    import torch

    made = hashlib.blake2b()
    for name, parameter in sorted(parameters):
        made.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        made.update(parameter.detach().contiguous().flatten().view(torch.uint8).numpy())
    return made.hexdigest()


class _Log(logging.Handler):
    """Keeps the seconds of vLLM's line about a load."""

    seconds: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        found = _TOOK.match(record.getMessage())
        if found and self.seconds is None:
            self.seconds = float(found[1])


def engine_row(row: str, arguments: Mapping[str, Any]) -> None:
    """Make an engine, and measure how its weights are loaded."""
    from vllm import LLM

    way, found = ROWS[row], dict[str, Any]()
    began = time.perf_counter()
    with _loaders_measured(found):
        llm = LLM(
            model=arguments["folder"] if way.is_local else "s3://bench/large",
            load_format=way.load_format,
            model_loader_extra_config=way.extra_config(arguments["file_bytes"]),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            dtype="bfloat16",
            distributed_executor_backend="uni",
        )
    started = time.perf_counter() - began
    llm.llm_engine.engine_core.shutdown()
    sample: Sample = found.pop("sample")
    emit(sample, engine_seconds=started, **found)


def environ_of(scratch: Path, endpoint: str) -> dict[str, str]:
    """Return the variables of an engine: the store, caches that are this run's own, no hub."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "S3STREAM_CACHE_DIR": str(scratch / "s3stream"),
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "VLLM_ASSETS_CACHE": str(scratch / "assets"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HOME": str(scratch / "hub"),
        "HF_HUB_OFFLINE": "1",
    }


def run(rows: Sequence[str], *, rounds: int, layers: int, store: str) -> dict[str, Any]:
    config, results = engine_config(layers), []
    with tempfile.TemporaryDirectory(prefix="s3stream-bench-") as folder:
        root, scratch = Path(folder) / "root", Path(folder) / "scratch"
        local = root / "bench" / "large"
        write_checkpoint(local, config)
        file_bytes = (local / "model.safetensors").stat().st_size
        arguments = {"folder": str(local), "file_bytes": file_bytes}
        with object_server(root, *store_options(store)) as server:
            environ = environ_of(scratch, server.endpoint)
            # What vLLM finds out about a class of models, it keeps for later starts.
            run_row(MODULE, "default, from disk", arguments, environ=environ)
            for number in range(rounds):
                found = {}
                for row in rows if number % 2 == 0 else rows[::-1]:
                    found[row] = run_row(MODULE, row, arguments, environ=environ, server=server)
                    found[row]["served_ratio"] = found[row]["served_bytes"] / file_bytes
                check_round(found)
                results.append(found)
                print(f"round {number + 1} of {rounds} done", flush=True)
    from tests.benchmarks.trace_cost import version_of_vllm

    packages = sorted({package for row in rows for package in ROWS[row].packages})
    return {
        "what": "vLLM on CPU loading a checkpoint from a store over loopback, and from disk with a warm page cache",
        "environment": {**environment(*packages), "vllm": version_of_vllm()},
        "checkpoint_bytes": file_bytes,
        "store": {"name": store, **STORES[store]},
        "median_wall_seconds": {row: round(medians(results, row, "wall_seconds"), 3) for row in rows},
        "median_logged_seconds": {
            row: medians(results, row, "logged_seconds")
            for row in rows
            if results[0][row]["logged_seconds"] is not None
        },
        "median_cpu_seconds": {row: round(medians(results, row, "cpu_seconds"), 3) for row in rows},
        "median_peak_extra_mib": {row: round(medians(results, row, "peak_extra_bytes") / MIB) for row in rows},
        "median_served_ratio": {row: round(medians(results, row, "served_ratio"), 4) for row in rows},
        "median_requests": {row: medians(results, row, "requests") for row in rows},
        "wall_ratio_to_s3stream": {row: ratio(results, row, BASE, "wall_seconds") for row in rows},
        "cpu_ratio_to_s3stream": {row: ratio(results, row, BASE, "cpu_seconds") for row in rows},
        "rounds": results,
    }


def check_round(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that all rows loaded the same.

    Raises:
        RuntimeError: they did not, or one that reads the store read less than the checkpoint.
    """
    if len({row["digest"] for row in found.values()}) != 1:
        raise RuntimeError(f"parameters differ: { ({name: row['digest'][:8] for name, row in found.items()}) }")
    for name, row in found.items():
        if not ROWS[name].is_local and row["served_ratio"] < 0.999:
            raise RuntimeError(f"{name} asked for {row['served_ratio']:.3f} of the checkpoint only")


def require_engine(rows: Sequence[str]) -> None:
    """Check that vLLM, and what `rows` need, are installed.

    Raises:
        SystemExit: something is not.
    """
    from tests.vllm.serving import has_cpu_engine

    if not has_cpu_engine():
        raise SystemExit("this needs vLLM for CPUs: .ci/vllm-environment makes an environment with it")
    for row in rows:
        require(ROWS[row].packages, f"row {row!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="size of the checkpoint, 92 MB a layer and 262 MB")
    parser.add_argument("--store", choices=list(STORES), default="s3like")
    parser.add_argument(
        "--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="; ".join(ROWS)
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the raw results")
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        engine_row(options.row, options.arguments)
        return
    rows = [row for row in ROWS if row == BASE or row in options.only]
    require_engine(rows)
    document = run(rows, rounds=options.rounds, layers=options.layers, store=options.store)
    path = save("engine", document, options.results)
    print(f"\n{document['checkpoint_bytes'] / GIB:.2f} GiB, medians of {options.rounds} rounds; ratios to {BASE}\n")
    print("| load | wall s | ratio (min-max) | CPU s | ratio (min-max) | extra MiB | bytes served | requests |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row} | {document['median_wall_seconds'][row]:.2f} | {spread(document['wall_ratio_to_s3stream'][row])} "
            f"| {document['median_cpu_seconds'][row]:.2f} | {spread(document['cpu_ratio_to_s3stream'][row])} "
            f"| {document['median_peak_extra_mib'][row]} | {document['median_served_ratio'][row]:.3f} "
            f"| {document['median_requests'][row]:.0f} |"
        )
    print(f"\nraw results: {path}")


if __name__ == "__main__":
    main()
