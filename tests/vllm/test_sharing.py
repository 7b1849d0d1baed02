"""Tensor-parallel ranks of vLLM's models that load together: the machine fetches every byte once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers.object_server import Fault, ObjectServer, Request, Response
from tests.vllm.case import Case, hub
from tests.vllm.cases import CASES as CENSUS
from tests.vllm.cases import write_checkpoint
from tests.vllm.decoders import NO_AUX
from tests.vllm.ranks import Rank, load_on_ranks, union

#: Large enough for reads of a usual kind, and for eight ranks; two of the key heads are on several ranks.
SHAPE: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}


def second_experts_last(name: str) -> tuple[bool, str]:
    """Sort the experts of the second of two ranks behind everything else."""
    return bool(re.search(r"\.experts\.[23]\.", name)), name


CASES = (
    Case(name="llama", make=hub("llama", **SHAPE), shards=3),
    Case(
        name="qwen3_moe",
        make=hub("qwen3_moe", **SHAPE, **EXPERTS, head_dim=32, num_experts=8, decoder_sparse_step=1),
    ),
    Case(
        name="deepseek_v3",
        make=hub(
            "deepseek_v3",
            **{**SHAPE, **EXPERTS, "num_key_value_heads": 8},
            n_routed_experts=8,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=128,
            kv_lora_rank=128,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            n_group=2,
            topk_group=1,
            patch=NO_AUX,
        ),
    ),
    Case(
        name="qwen3_moe_whole_experts",
        make=hub("qwen3_moe", **SHAPE, **EXPERTS, head_dim=32, num_experts=8, decoder_sparse_step=1),
        experts=True,
    ),
    Case(
        name="mixtral_online_fp8_apart",
        make=hub("mixtral", **{**SHAPE, "num_key_value_heads": 8}, num_local_experts=4, num_experts_per_tok=2),
        engine={"quantization": "fp8"},
        experts=True,
        order=second_experts_last,
    ),
)

#: Tensors here are a hundredth of the usual size. With a gap that is too, reads lie among them as they do in large
#: checkpoints; with the default, everything is read in one stretch.
OPTIONS: Mapping[str, Any] = {"coalesce_gap_bytes": 4096, "header_read_bytes": 8192, "hedge": False}


@dataclass(frozen=True, slots=True)
class Got:
    """Bytes of weights that a rank got from the store, headers not counted; None is a reader who is no rank."""

    rank: int | None
    start: int
    end: int


@dataclass(slots=True)
class Loaded:
    """Several ranks' loads.

    Attributes:
        got: what the store sent when they loaded together.
    """

    ranks: list[Rank]
    got: list[Got]
    folder: Path

    def bytes_got(self) -> int:
        return sum(got.end - got.start for got in self.got)

    def check(self) -> None:
        """Check that every rank loaded the same as alone, and the store sent hardly a byte twice."""
        size = len(self.ranks)
        assert [rank.different for rank in self.ranks] == [[]] * size
        needed = union([rank.needed for rank in self.ranks])
        alone = sum(rank.alone.fetched_bytes for rank in self.ranks)
        assert alone > 1.03 * needed, "this would prove nothing"
        assert {got.rank for got in self.got if got.start < got.end} == set(range(size))
        assert needed <= self.bytes_got() <= 1.02 * needed
        for rank in self.ranks:
            sharing = rank.together.sharing
            assert sharing is not None
            assert sharing.ranks == size
            assert rank.alone.sharing is None
            assert rank.own_fills == 0
            assert rank.together.needed_bytes == rank.alone.needed_bytes
            assert sharing.node_fetched_bytes is not None
            assert needed <= sharing.node_fetched_bytes <= 1.02 * needed + OPTIONS["header_read_bytes"] * 4


Load = Callable[..., Loaded]


@pytest.fixture
def load(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gated_layers: None
) -> Callable[..., Loaded]:
    """Return a function that loads a case on so many ranks."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_s3stream import register

    register()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    cases = {case.name: case for case in (*CENSUS, *CASES)}

    def run(name: str, size: int, **options: Any) -> Loaded:
        folder = tmp_path / "m"
        write_checkpoint(cases[name], folder)
        server.put_folder("models", "org/m/", folder)
        config = EngineArgs(
            model="s3://models/org/m", load_format="s3stream", enforce_eager=True, skip_tokenizer_init=True
        ).create_engine_config()
        got: list[Got] = []
        headers = {path.name: header_bytes(path) for path in folder.glob("*.safetensors")}

        def note(request: Request, response: Response) -> None:
            signer = re.search(r"Credential=RANK(\d+)", request.headers.get("authorization", request.target))
            first = headers.get(Path(request.key).name)
            if first is not None:
                start, end = response.start, response.start + response.count
                got.append(Got(int(signer[1]) if signer else None, max(start, first), max(end, first)))

        server.faults = [Fault(note, times=None)]
        ranks = load_on_ranks(cases[name], folder, Path(config.model_config.model), size, **{**OPTIONS, **options})
        return Loaded(ranks, got, folder)

    return run


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_machine_fetches_every_byte_once(load: Load, name: str, size: int) -> None:
    import vllm

    if name == "deepseek_v3" and vllm.__version__.startswith("0.28."):
        pytest.skip("vLLM 0.28 builds DeepSeek's attention on GPUs only")
    load(name, size).check()


def test_with_the_default_gap(load: Load) -> None:
    load("llama", 8, coalesce_gap_bytes=512 << 10).check()


def test_whole_experts_are_read_by_the_rank_that_has_them(load: Load) -> None:
    loaded = load("qwen3_moe_whole_experts", 2)
    loaded.check()
    path = loaded.folder / "model.safetensors"
    first = header_bytes(path)
    header = json.loads(path.read_bytes()[8:first])
    readers: dict[int, set[int | None]] = {}
    for name, entry in header.items():
        if ".experts." in name:
            start, end = (first + offset for offset in entry["data_offsets"])
            expert = int(name.split(".experts.")[1].split(".")[0])
            readers.setdefault(expert, set()).update(
                got.rank for got in loaded.got if got.start < end and start < got.end
            )
    assert readers == {expert: {expert // 4} for expert in range(8)}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        # Per decoder layer: qkv, o, gate_up, down; in the order in which the checkpoint has them.
        ("llama_online_fp8", [1, 2, 1, 3]),
        # Twelve matrices of four experts at once.
        ("mixtral_online_fp8", [12, 1, 3]),
    ],
)
def test_layers_are_shared_as_they_are_quantised(load: Load, name: str, layers: Sequence[int]) -> None:
    loaded = load(name, 2)
    loaded.check()
    for rank in loaded.ranks:
        assert rank.shared_fills[:-1] == [*layers, *layers]


def test_ranks_that_complete_layers_in_another_order(load: Load) -> None:
    """One rank has all its experts before vLLM's collectives for the attention layers, the other long after."""
    loaded = load("mixtral_online_fp8_apart", 2, share_timeout_seconds=20.0)
    assert [rank.different for rank in loaded.ranks] == [[], []]
    assert [rank.own_fills for rank in loaded.ranks] == [2, 2]  # the experts of each layer
    assert loaded.bytes_got() <= 1.02 * union([rank.needed for rank in loaded.ranks])
