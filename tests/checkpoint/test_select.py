"""Which files are the model: the index decides, then names; the rest is listed with a reason."""

from __future__ import annotations

import json

import pytest

from streamer.checkpoint.checkpoint import Checkpoint, assemble
from streamer.checkpoint.header import FileHeader, HeaderTensor
from streamer.checkpoint.index import Index, parse_index
from streamer.checkpoint.select import (
    MOST_BESIDE_BYTES,
    Listed,
    Selection,
    accompanying,
    choose_index,
    has_weights_beside,
    select_files,
)
from streamer.errors import CheckpointError, IncompleteCheckpointError, UnsupportedCheckpointError

INDEX = "model.safetensors.index.json"


def listing(*keys: str) -> list[Listed]:
    return [Listed(key, 10) for key in keys]


def index_of(**files: str) -> Index:
    return Index(INDEX, {name: file.replace("__", "-") for name, file in files.items()})


def select(*keys: str, index: Index | None = None) -> Selection:
    return select_files("s3://b/m/", listing(*keys), index)


def keys_of(selection: Selection) -> list[str]:
    return [item.key for item in selection.weights]


def test_index_decides() -> None:
    index = index_of(a="model-1.safetensors", b="sub/model-2.safetensors")
    selection = select(
        "model-1.safetensors",
        "sub/model-2.safetensors",
        "model-old.safetensors",
        "consolidated.safetensors",
        INDEX,
        index=index,
    )
    assert keys_of(selection) == ["model-1.safetensors", "sub/model-2.safetensors"]
    assert {item.key: item.reason for item in selection.skipped} == {
        "model-old.safetensors": f"not named by {INDEX}",
        "consolidated.safetensors": "a second copy of the weights in consolidated form",
    }


def test_without_index_model_files_come_first_in_natural_order() -> None:
    selection = select(
        "model-00010-of-00010.safetensors",
        *(f"model-0000{number}-of-00010.safetensors" for number in range(1, 10)),
        "vae.safetensors",
        "config.json",
        "model.pt",
    )
    assert keys_of(selection)[-1] == "model-00010-of-00010.safetensors"
    assert len(keys_of(selection)) == 10
    assert [(item.key, item.reason) for item in selection.skipped] == [("model.pt", "pickled weights are never opened")]
    assert [item.key for item in selection.metadata] == ["config.json", "vae.safetensors"]


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        (["pytorch_model.safetensors", "consolidated.safetensors"], ["pytorch_model.safetensors"]),
        (["consolidated.00.safetensors"], ["consolidated.00.safetensors"]),
        (["adapter_model.safetensors"], ["adapter_model.safetensors"]),
        (["weights.safetensors", "adapter_model.safetensors"], ["weights.safetensors"]),
        (["a2.safetensors", "a10.safetensors"], ["a2.safetensors", "a10.safetensors"]),
    ],
)
def test_without_index_any_set_at_the_root(present: list[str], chosen: list[str]) -> None:
    assert keys_of(select(*present)) == chosen


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (".git/objects/pack/x.pack", "inside .git/"),
        (".cache/huggingface/x", "inside .cache/"),
        ("original/consolidated.00.pth", "inside original/"),
        ("onnx/model.onnx", "inside onnx/"),
        ("optimizer.pt", "training state"),
        ("pytorch_model.bin", "pickled weights are never opened"),
        ("x.gguf", "weights in gguf form"),
        ("tf_model.h5", "weights in h5 form"),
        ("adapter_model.safetensors", "an adapter, not the model"),
        ("checkpoint-500/model.safetensors", "in a subfolder that no index names"),
        (".hidden/model.safetensors", "inside .hidden/"),
    ],
)
def test_skipped_with_a_reason(key: str, reason: str) -> None:
    selection = select("model.safetensors", key)
    assert [(item.key, item.reason) for item in selection.skipped] == [(key, reason)]


def test_everything_that_is_not_weights_is_metadata() -> None:
    side = ["1_Pooling/config.json", "chat_template.jinja", "merges.txt", "modeling_x.py", "special.tiktoken"]
    selection = select("model.safetensors", *side)
    assert [item.key for item in selection.metadata] == side
    assert selection.skipped == ()


BESIDE = [
    "2_Dense/model.safetensors",
    "3_Dense/pytorch_model.bin",
    "adapters/retrieval/adapter_model.safetensors",
    "joint_head.safetensors",
    "mask_embedding.pt",
]


@pytest.mark.parametrize("is_indexed", [False, True])
def test_weights_that_code_reads_by_name_go_along(is_indexed: bool) -> None:
    """vLLM and SGLang look for these in the model's folder, and some of their code takes a missing one for unwanted."""
    weights = ["model-1.safetensors", "late.safetensors"] if is_indexed else ["model.safetensors"]
    index = index_of(a="model-1.safetensors", b="late.safetensors") if is_indexed else None
    twins = ["2_Dense/pytorch_model.bin", "pytorch_model.bin", "consolidated.safetensors", "optimizer.pt"]
    keys = [*weights, *BESIDE, *twins, "config.json"]
    selection = select(*keys, index=index)
    assert sorted(keys_of(selection)) == sorted(weights)
    assert [item.key for item in selection.metadata] == sorted([*BESIDE, "config.json"])
    assert accompanying(listing(*keys), index) == {*BESIDE, "config.json"}
    assert has_weights_beside(listing(*keys))


def test_whole_models_beside_the_model_do_not_go_along() -> None:
    files = [Listed("model.safetensors", 10), Listed("text_encoder/model.safetensors", MOST_BESIDE_BYTES + 1)]
    selection = select_files("s3://b/m/", files, None)
    assert [item.reason for item in selection.skipped] == ["in a subfolder that no index names"]
    assert accompanying(files, None) == set()


def test_where_the_root_has_no_weights_subfolders_are_the_model() -> None:
    assert accompanying(listing("transformer/model.safetensors", "vae/model.safetensors", "a.json"), None) == {"a.json"}


def test_missing_shards_are_all_named() -> None:
    index = index_of(a="s__1.safetensors", b="s__2.safetensors", c="s__3.safetensors")
    with pytest.raises(IncompleteCheckpointError, match="lacks 2 of the 3 files.*s-1.safetensors, s-3.safetensors"):
        select("s-2.safetensors", INDEX, index=index)


def test_numbered_shards_are_counted_without_an_index() -> None:
    with pytest.raises(IncompleteCheckpointError, match="lacks 2 of 3 shards: model-00001-of-00003.*00003-of-00003"):
        select("model-00002-of-00003.safetensors")


def test_index_left_over_beside_pickles() -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"none of its 1 shards, only pytorch_model.bin.*convert"):
        select("pytorch_model.bin", INDEX, index=index_of(a="model.safetensors"))


@pytest.mark.parametrize(
    ("present", "words"),
    [
        (["pytorch_model.bin", "config.json"], r"only pickled weights \(pytorch_model.bin\).*convert them"),
        (["x.gguf", "y.gguf"], r"only GGUF weights \(x.gguf, y.gguf\)"),
        (["sub/model.safetensors"], "only in sub.*give the URL of the folder"),
        (["config.json"], "no safetensors files, only config.json"),
        ([], "no objects"),
    ],
)
def test_nothing_to_load_says_what_to_do(present: list[str], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        select(*present)


def test_both_forms_present_takes_safetensors() -> None:
    assert keys_of(select("model.safetensors", "pytorch_model.bin")) == ["model.safetensors"]


def test_choice_of_index() -> None:
    assert choose_index(listing("config.json")) is None
    assert choose_index(listing(INDEX, "other.safetensors.index.json")) == INDEX
    assert choose_index(listing("consolidated.safetensors.index.json", "x.safetensors.index.json")) == (
        "x.safetensors.index.json"
    )
    assert choose_index(listing("sub/" + INDEX)) is None
    with pytest.raises(CheckpointError, match="several indexes"):
        choose_index(listing("x.safetensors.index.json", "y.safetensors.index.json"))


def test_index_is_relative_to_its_folder_and_stays_inside() -> None:
    parsed = parse_index("sub/" + INDEX, json.dumps({"weight_map": {"a": "x.safetensors"}}).encode(), "i")
    assert parsed.files == ("sub/x.safetensors",)
    for outside in ("../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors"):
        with pytest.raises(CheckpointError, match="outside the checkpoint"):
            parse_index(INDEX, json.dumps({"weight_map": {"a": outside}}).encode(), "i")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"<html></html>", "an HTML page"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "no weight_map"),
        (b'{"weight_map":{}}', "no weight_map"),
        (b'{"weight_map":{"a":3}}', "not a file name"),
    ],
)
def test_bad_indexes_are_named(body: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_index(INDEX, body, "the index")


def header(*names: str) -> FileHeader:
    tensors = tuple(HeaderTensor(name, "U8", (1,), 8 + n, 9 + n) for n, name in enumerate(names))
    return FileHeader(tensors, {}, 8)


def join(index: Index | None, **files: list[str]) -> Checkpoint:
    return assemble("s3://b/m/", listing(*files), [header(*names) for names in files.values()], index=index)


def test_index_and_headers_agree() -> None:
    checkpoint = join(Index(INDEX, {"a": "x", "b": "y"}), x=["a"], y=["b"])
    assert [(name, info.file) for name, info in checkpoint.tensors.items()] == [("a", 0), ("b", 1)]
    assert checkpoint.unindexed == ()
    assert checkpoint.nbytes == 2


def test_tensor_missing_from_the_index_is_loaded_and_named() -> None:
    checkpoint = join(Index(INDEX, {"a": "x"}), x=["a", "scale"])
    assert checkpoint.unindexed == ("scale",)
    assert "scale" in checkpoint.tensors


def test_tensor_missing_from_the_headers() -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"names 2 tensors that no file holds: b \(x\), c \(x\)"):
        join(Index(INDEX, {"a": "x", "b": "x", "c": "x"}), x=["a"])


def test_tensor_in_the_wrong_file() -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"wrong file: b \(in x, not y\)"):
        join(Index(INDEX, {"a": "x", "b": "y"}), x=["a", "b"], y=[])


def test_duplicate_tensors_are_refused() -> None:
    with pytest.raises(IncompleteCheckpointError, match="tensor 'a' is in both x and y"):
        join(None, x=["a"], y=["a"])
