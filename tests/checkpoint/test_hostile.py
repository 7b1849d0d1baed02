"""Checkpoints made to do harm: whatever they hold, a load is right or ends in an error of ours, and quickly.

``HOSTILE_EXAMPLES=20000 pytest tests/checkpoint/test_hostile.py`` runs longer.
"""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamer.checkpoint.index import parse_index
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, ConfigError, StreamError
from streamer.fetch.engine import FetchEngine
from streamer.reference.config import LlamaConfig
from streamer.sources.memory import MemorySource
from tests.files import entry, raw_file

GOOD = raw_file({"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 8, 11)}, bytes(range(11)))
EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "300"))
INDEX_KEY = "model.safetensors.index.json"

_names = st.sampled_from(
    [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "../x.safetensors",
        "/etc/passwd",
        "a/../../b.safetensors",
        "sub/model.safetensors",
        "",
        ".",
        "model.safetensors/",
        "nul\0.safetensors",
        "consolidated.safetensors",
    ]
)
_CONFIGURED = [
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rope_scaling",
    "intermediate_size",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "dtype",
    "head_dim",
    "sliding_window",
]
_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), _names),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


def open_checkpoint(objects: dict[str, bytes]) -> Any:
    with FetchEngine(MemorySource(objects), StreamConfig(header_read_bytes=64)) as engine:
        return engine.open_checkpoint().checkpoint


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, bytes]:
    """A good checkpoint with some of its bytes, names or documents replaced."""
    body = bytearray(GOOD)
    for _ in range(draw(st.integers(0, 2))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        body[:8] = struct.pack("<Q", draw(st.sampled_from([0, 1, 2**31, 2**32 + 1, 2**63, 2**64 - 1, len(GOOD)])))
    objects = {draw(_names) or "model.safetensors": bytes(body)}
    if draw(st.booleans()):
        index = draw(
            st.one_of(_json, st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=3), _names)}))
        )
        objects[INDEX_KEY] = json.dumps(index).encode()
    return objects


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(checkpoints())
def test_any_checkpoint_is_right_or_refused(objects: dict[str, bytes]) -> None:
    try:
        checkpoint = open_checkpoint(objects)
    except StreamError:
        return
    for file in checkpoint.files:
        assert file.key in objects
        assert ".." not in file.key.split("/")
    for info in checkpoint.tensors.values():
        assert 8 <= info.start <= info.end <= checkpoint.files[info.file].size


@settings(max_examples=EXAMPLES, deadline=None)
@given(_json)
def test_any_index_is_right_or_refused(document: Any) -> None:
    try:
        index = parse_index(INDEX_KEY, json.dumps(document).encode(), "i")
    except CheckpointError:
        return
    assert all(not file.startswith("/") and ".." not in file.split("/") for file in index.files)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(_CONFIGURED),
        st.one_of(_json, st.just("llama")),
    )
)
def test_any_configuration_is_right_or_refused(document: dict[str, Any]) -> None:
    base = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8}
    try:
        config = LlamaConfig.from_dict({**base, "num_attention_heads": 4, **document})
    except StreamError:
        return
    assert config.hidden_size > 0
    assert config.layers > 0


BOMBS = {
    "a header longer than memory": struct.pack("<Q", 2**62) + b"{",
    "a header of the largest allowed length that is not there": struct.pack("<Q", 100_000_000) + b"{" + b" " * 100,
    "a shape with more elements than bytes": raw_file({"a": entry("F32", [2**40, 2**40], 0, 8)}, bytes(8)),
    "a shape that wraps around": raw_file({"a": entry("F32", [2**32, 2**32, 0], 0, 8)}, bytes(8)),
    "offsets beyond the file": raw_file({"a": entry("U8", [2**50], 0, 2**50)}, bytes(8)),
    "arrays in arrays": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a number without end": struct.pack("<Q", 300_010) + b'{"a":' + b"9" * 300_000 + b"}    ",
    "gzip": b"\x1f\x8b\x08\0\0\0\0\0" + bytes(100),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_without_going_off(name: str) -> None:
    tracemalloc.start()
    began = time.monotonic()
    with pytest.raises(CheckpointError):
        open_checkpoint({"model.safetensors": BOMBS[name]})
    assert time.monotonic() - began < 20
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"weight_map":' + b"[" * 100_000, b'{"weight_map": {"a": "' + b"x" * 10]
)
def test_index_bombs_are_refused(body: bytes) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint({"model.safetensors": GOOD, INDEX_KEY: body})


def test_options_of_a_checkpoint_are_none() -> None:
    """Nothing in a checkpoint sets an option of the loader."""
    objects = {"model.safetensors": GOOD, "config.json": b'{"s3stream": {"endpoint_url": "http://evil"}}'}
    assert open_checkpoint(objects).tensors.keys() == {"a", "b"}
    with pytest.raises(ConfigError):
        StreamConfig.resolve({"s3stream": {}})
