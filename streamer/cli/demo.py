"""``s3stream demo``: the main job from end to end on an embedded store, in one command."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from streamer.cli.output import Output, size_text
from streamer.cli.store import missing_for_demo, start_store
from streamer.config import StreamConfig
from streamer.errors import LoadError
from streamer.loader import load
from streamer.reference.config import LlamaConfig
from streamer.reference.engine import build_llama
from streamer.reference.parallel import Parallel

__all__ = ["run_demo"]

_BUCKET, _PREFIX = "models", "demo/tiny-llama"
_SHARDS = 3
_TOLERANCE = 1e-4
#: Heads and features divide by 8, so that --tp 1, 2, 4 and 8 work.
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"}
_RANK_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """What one rank did."""

    rank: int
    parameter_bytes: int
    needed_bytes: int
    fetched_bytes: int
    requests: int
    seconds: float
    logits: torch.Tensor


def run_demo(tp: int, output: Output) -> bool:
    """Run the demo on `tp` ranks and print its outcome; return whether everything was as it should be."""
    began = time.perf_counter()
    config = LlamaConfig.from_dict(_MODEL)
    build_llama(config, Parallel(0, tp))  # refuses sizes that cannot be split, before anything starts
    weights = _random_weights(config)
    tokens = torch.randint(0, config.vocabulary, (2, 32), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory(prefix="s3stream-demo-") as folder:
        _write_checkpoint(Path(folder), weights)
        output.note("starting an S3 store in this process")
        with start_store() as endpoint:
            uploaded = _upload(Path(folder), endpoint)
            output.note(f"uploaded {uploaded} files to s3://{_BUCKET}/{_PREFIX}")
            output.note(f"loading it on {tp} {'rank' if tp == 1 else 'ranks'}")
            ranks = _load_on_ranks(tp, endpoint, tokens)
    unsharded = build_llama(config, Parallel(), load_device="cpu")
    unsharded.load_weights(weights.items())
    difference = float((ranks[0].logits - unsharded(tokens)).abs().max())
    document = {
        "ok": difference < _TOLERANCE and all(rank.needed_bytes == rank.parameter_bytes for rank in ranks),
        "tp": tp,
        "checkpoint_bytes": sum(tensor.nbytes for tensor in weights.values()),
        "node_fetched_bytes": sum(rank.fetched_bytes for rank in ranks),
        "max_abs_logit_diff": difference,
        "ranks": [
            {
                "rank": rank.rank,
                "parameter_bytes": rank.parameter_bytes,
                "needed_bytes": rank.needed_bytes,
                "fetched_bytes": rank.fetched_bytes,
                "requests": rank.requests,
                "load_seconds": round(rank.seconds, 3),
            }
            for rank in ranks
        ],
        "seconds": round(time.perf_counter() - began, 3),
    }
    output.result(document, lambda console: _show(document, console))
    return bool(document["ok"])


def _random_weights(config: LlamaConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.05

    hidden, wide, kv = config.hidden_size, config.intermediate_size, config.kv_heads * config.head_size
    weights = {"model.embed_tokens.weight": random(config.vocabulary, hidden)}
    for number in range(config.layers):
        layer = f"model.layers.{number}."
        weights |= {
            layer + "input_layernorm.weight": 1 + random(hidden),
            layer + "self_attn.q_proj.weight": random(config.heads * config.head_size, hidden),
            layer + "self_attn.k_proj.weight": random(kv, hidden),
            layer + "self_attn.v_proj.weight": random(kv, hidden),
            layer + "self_attn.o_proj.weight": random(hidden, config.heads * config.head_size),
            layer + "post_attention_layernorm.weight": 1 + random(hidden),
            layer + "mlp.gate_proj.weight": random(wide, hidden),
            layer + "mlp.up_proj.weight": random(wide, hidden),
            layer + "mlp.down_proj.weight": random(hidden, wide),
        }
    weights["model.norm.weight"] = 1 + random(hidden)
    weights["lm_head.weight"] = random(config.vocabulary, hidden)
    return weights


def _write_checkpoint(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise missing_for_demo(error) from error
    names = list(weights)
    weight_map = {}
    for number in range(_SHARDS):
        file = f"model-{number + 1:05d}-of-{_SHARDS:05d}.safetensors"
        shard = names[number * len(names) // _SHARDS : (number + 1) * len(names) // _SHARDS]
        save_file({name: weights[name] for name in shard}, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_MODEL))


def _upload(folder: Path, endpoint: str) -> int:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=_CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        config=Config(proxies={}),
    )
    client.create_bucket(Bucket=_BUCKET)
    paths = sorted(folder.iterdir())
    for path in paths:
        client.put_object(Bucket=_BUCKET, Key=f"{_PREFIX}/{path.name}", Body=path.read_bytes())
    return len(paths)


def _load_on_ranks(tp: int, endpoint: str, tokens: torch.Tensor) -> list[_Ranked]:
    """Load on `tp` processes at once; their first error is raised as itself."""
    with tempfile.TemporaryDirectory(prefix="s3stream-demo-") as folder:
        rendezvous = f"file://{folder}/rendezvous"
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(tp, mp_context=context) as pool:
            running = [pool.submit(_run_rank, rank, tp, endpoint, rendezvous, tokens) for rank in range(tp)]
            try:
                return [future.result() for future in running]
            except BrokenProcessPool as error:
                raise LoadError("a rank of the demo died", hint="is there enough memory?") from error


def _run_rank(rank: int, tp: int, endpoint: str, rendezvous: str, tokens: torch.Tensor) -> _Ranked:
    """One rank's process: build, load, and run the model together with the others."""
    torch.set_num_threads(1)
    # The user's own AWS settings have no business here.
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3STREAM_"))]:
        del os.environ[name]
    os.environ.update(_CREDENTIALS, AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    group = None
    if tp > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=tp, timeout=_RANK_TIMEOUT)
        group = dist.group.WORLD
    try:
        model = build_llama(LlamaConfig.from_dict(_MODEL), Parallel(rank, tp, group), load_device="cpu")
        config = StreamConfig(endpoint_url=endpoint, region="us-east-1")
        began = time.perf_counter()
        report = load(model, f"s3://{_BUCKET}/{_PREFIX}", config, group=group)
        seconds = time.perf_counter() - began
        logits = model(tokens)
    finally:
        if tp > 1:
            dist.destroy_process_group()
    return _Ranked(
        rank=rank,
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        needed_bytes=report.needed_bytes,
        fetched_bytes=report.fetched_bytes,
        requests=report.requests,
        seconds=seconds,
        logits=logits,
    )


def _show(document: dict[str, Any], console: Console) -> None:
    total = document["checkpoint_bytes"]
    table = Table("rank", "parameters", "needed", "fetched", "requests", box=None)
    for rank in document["ranks"]:
        table.add_row(
            str(rank["rank"]),
            size_text(rank["parameter_bytes"]),
            f"{size_text(rank['needed_bytes'])} ({rank['needed_bytes'] / total:.1%} of the checkpoint)",
            size_text(rank["fetched_bytes"]),
            str(rank["requests"]),
        )
    console.print(table)
    verdict = "the same as" if document["ok"] else "NOT the same as"
    console.print(
        f"\nlogits are {verdict} the unsharded model's: they differ by at most "
        f"{document['max_abs_logit_diff']:.2g} ({document['seconds']} s in all)"
    )
