"""`load` and `iterate` as users call them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import streamer
from streamer.errors import ConfigError, LoadError, MissingParametersError, SourceUnavailableError
from streamer.sources.memory import MemorySource
from tests.servers.object_server import Fault, ObjectServer, error_response
from tests.trace.loading import source_of


class Tied(torch.nn.Module):
    """An embedding and a head that share their weight, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(0, 50, value.shape, generator=generator).to(value.dtype)
        for name, value in module.state_dict().items()
    }


@pytest.fixture(params=["trace", "eager"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_plain_module_with_tied_weights_and_buffers(mode: str) -> None:
    state = state_of(Tied())
    del state["head.weight"]  # tied checkpoints leave it out
    model = Tied()
    report = streamer.load(model, source_of(state), {"mode": mode})
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value)
    assert model.head.weight is model.embed.weight
    assert set(report.expected) == set(report.loaded) == set(model.state_dict())
    assert "scratch" not in report.expected


def test_tied_weight_given_twice_takes_the_last_as_eager_does() -> None:
    state = state_of(Tied())
    state["head.weight"] = state["embed.weight"] + 1
    results = {}
    for mode in ("trace", "eager"):
        model = Tied()
        report = streamer.load(model, source_of(state), {"mode": mode})
        results[mode] = model.embed.weight.clone()
        if mode == "trace":
            assert sum("overwritten by" in reason for reason in report.ignored.values()) == 1
    assert torch.equal(results["trace"], results["eager"])


def test_unexpected_tensors_are_reported_and_cost_nothing() -> None:
    state = state_of(torch.nn.Linear(4, 4)) | {"extra.position_ids": torch.zeros(100_000)}
    report = streamer.load(torch.nn.Linear(4, 4), source_of(state), {"coalesce_gap_bytes": 0})
    assert report.unexpected == ("extra.position_ids",)
    assert report.ignored == {}
    assert report.fetched_bytes == 20 * 4


def test_missing_keys_are_an_error_or_reported(mode: str) -> None:
    state = state_of(Tied())
    del state["norm.running_mean"], state["head.weight"]
    with pytest.raises(MissingParametersError, match=r"no values for 1 parameters: norm.running_mean") as caught:
        streamer.load(Tied(), source_of(state), {"mode": mode})
    assert caught.value.names == ("norm.running_mean",)
    report = streamer.load(Tied(), source_of(state), {"mode": mode, "strict": False})
    assert set(report.expected) - set(report.loaded) == {"norm.running_mean"}


def test_missing_names_come_with_the_nearest_in_the_checkpoint() -> None:
    state = {f"model.{name}": value for name, value in state_of(torch.nn.Linear(4, 4)).items()}
    with pytest.raises(MissingParametersError, match=r"bias \(nearest in the checkpoint: model.bias\)"):
        streamer.load(torch.nn.Linear(4, 4), source_of(state))


def test_shapes_that_differ_name_both(mode: str) -> None:
    with pytest.raises(LoadError, match=r"weight has shape \[4, 4\] in the checkpoint and \[4, 5\] in the model"):
        streamer.load(torch.nn.Linear(5, 4), source_of(state_of(torch.nn.Linear(4, 4))), {"mode": mode})


def test_parameters_on_meta_are_named() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    with pytest.raises(LoadError, match=r"is on the meta device.*to_empty"):
        streamer.load(model, source_of(state_of(torch.nn.Linear(4, 4))))


def test_dtypes_are_converted_as_copy_does(mode: str) -> None:
    state = {"weight": torch.randn(40, 30), "bias": torch.randn(40)}
    model = torch.nn.Linear(30, 40).to(torch.bfloat16)
    report = streamer.load(model, source_of(state), {"mode": mode})
    assert torch.equal(model.weight, state["weight"].to(torch.bfloat16))
    if mode == "trace":
        assert [(cast.source, cast.destination, cast.count) for cast in report.casts] == [
            ("torch.float32", "torch.bfloat16", 2)
        ]


def test_report_is_json_and_adds_up(server: ObjectServer, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(500, 300)
    state = state_of(model)
    server.put("bucket", "m/model.safetensors", safetensors.torch.save(state))
    caplog.set_level(logging.INFO, "streamer")
    seen = []
    report = streamer.load(
        model, "s3://bucket/m", {"endpoint_url": server.url}, progress=lambda done, total: seen.append((done, total))
    )
    document = json.loads(json.dumps(report.to_dict()))
    nbytes = (500 * 300 + 300) * 4
    assert document["checkpoint_bytes"] == document["needed_bytes"] == document["fetched_bytes"] == nbytes
    assert document["requests"] == server.counters.requests["GET"]
    assert document["header_bytes"] + document["fetched_bytes"] == server.counters.body_bytes - _listing_bytes(server)
    assert document["over_read_bytes"] == document["retries"] == document["resumed_bytes"] == 0
    times = document["times"]
    assert times["total"] >= times["headers"] + times["fetch"]
    assert times["headers"] < times["first_byte"] <= times["total"]
    assert seen[-1] == (nbytes, nbytes)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "streamer"]
    assert line.startswith("Loading weights took ")
    assert "0.60 MB of 0.60 MB fetched in 2 requests" in line


def _listing_bytes(server: ObjectServer) -> int:
    """What LIST responses took of the server's body bytes."""
    ranged = sum(end - start for _, start, end in server.counters.ranges)
    return server.counters.body_bytes - ranged


def test_from_a_coroutine_with_a_running_loop(server: ObjectServer) -> None:
    state = state_of(torch.nn.Linear(4, 4))
    server.put("bucket", "m/model.safetensors", safetensors.torch.save(state))
    model = torch.nn.Linear(4, 4)

    async def run() -> None:
        streamer.load(model, "s3://bucket/m", {"endpoint_url": server.url})
        for name, tensor in streamer.iterate("s3://bucket/m", {"endpoint_url": server.url}):
            assert torch.equal(tensor, state[name])

    asyncio.run(run())
    assert torch.equal(model.weight, state["weight"])


@pytest.mark.parametrize("suffix", ["", "/", "/model.safetensors"])
def test_local_folders_and_single_files(tmp_path: Path, suffix: str) -> None:
    state = state_of(torch.nn.Linear(4, 4))
    (tmp_path / "model.safetensors").write_bytes(safetensors.torch.save(state))
    (tmp_path / "other.safetensors").write_bytes(b"not this one")
    for url in (f"{tmp_path}{suffix}", f"file://{tmp_path}{suffix}"):
        model = torch.nn.Linear(4, 4)
        streamer.load(model, url)
        assert torch.equal(model.weight, state["weight"])


def test_single_object(server: ObjectServer) -> None:
    state = state_of(torch.nn.Linear(4, 4))
    server.put("bucket", "m/one.safetensors", safetensors.torch.save(state))
    server.put("bucket", "m/two.safetensors", safetensors.torch.save(state))
    found = dict(streamer.iterate("s3://bucket/m/one.safetensors", {"endpoint_url": server.url}))
    assert torch.equal(found["weight"], state["weight"])


def test_options_are_checked_before_anything_is_contacted() -> None:
    with pytest.raises(ConfigError, match="did you mean concurrency?"):
        streamer.load(torch.nn.Linear(1, 1), "s3://nowhere/m", {"concurency": 3})


def test_only_the_needed_bytes_leave_the_server(server: ObjectServer) -> None:
    """The point of it all, counted by the server: one half of one tensor."""
    server.put(
        "bucket", "m/model.safetensors", safetensors.torch.save({"w": torch.randn(4000, 500), "x": torch.randn(99)})
    )

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.empty(2000, 500), requires_grad=False)

        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                if name == "w":
                    self.w.data.copy_(tensor.narrow(0, 2000, 2000))

    config = {"endpoint_url": server.url, "header_read_bytes": 1024}
    report = streamer.load(Half(), "s3://bucket/m", config)
    assert report.fetched_bytes == 2000 * 500 * 4
    assert sum(end - start for _, start, end in server.counters.ranges) == 2000 * 500 * 4 + 1024


def test_incomplete_checkpoint_reads_no_weight_byte(server: ObjectServer) -> None:
    state = {f"t{n}": torch.zeros(100_000) for n in range(3)}
    weight_map = {}
    for number, (name, tensor) in enumerate(state.items()):
        file = f"model-0000{number + 1}-of-00003.safetensors"
        weight_map[name] = file
        if number != 1:
            server.put("bucket", f"m/{file}", safetensors.torch.save({name: tensor}))
    server.put("bucket", "m/model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
    with pytest.raises(ValueError, match="lacks 1 of the 3 files.*model-00002-of-00003.safetensors"):
        streamer.load(torch.nn.Linear(1, 1), "s3://bucket/m", {"endpoint_url": server.url})
    assert {key for key, _, _ in server.counters.ranges} == {"m/model.safetensors.index.json"}


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_open(server: ObjectServer, fails: bool) -> None:
    server.put("bucket", "m/model.safetensors", safetensors.torch.save({"weight": torch.randn(3000, 1000)}))
    options = {"endpoint_url": server.url, "retry_attempts": 2, "retry_first_wait_seconds": 0.01}

    def once() -> tuple[int, int]:
        server.faults = [Fault(lambda *_: error_response(500, "InternalError"), skip=2, times=None)] if fails else []
        model = torch.nn.Linear(1000, 3000, bias=False)
        with pytest.raises(SourceUnavailableError) if fails else contextlib.nullcontext():
            streamer.load(model, "s3://bucket/m", options)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    once()
    threads_of_server = threading.active_count()
    before = once()
    for _ in range(3):
        after = once()
    assert after[0] <= before[0] + 2  # sockets of the server, in this process too, close a moment later
    assert after[1] <= max(before[1], threads_of_server)


def test_big_endian_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(ValueError, match="big-endian"):
        streamer.load(torch.nn.Linear(1, 1), MemorySource({}))


def test_public_names() -> None:
    assert {name for name in streamer.__all__ if getattr(streamer, name) is not None} == set(streamer.__all__)
    with pytest.raises(AttributeError):
        streamer.nothing  # noqa: B018


def test_after_an_error_in_the_models_code_nothing_keeps_the_model() -> None:
    class Model(torch.nn.Linear):
        def load_weights(self, weights: Any) -> None:
            for _, tensor in weights:
                self.weight.copy_(tensor)
                raise KeyError("no such layer")

    model = Model(100, 100, bias=False)
    gone = weakref.ref(model)
    with pytest.raises(KeyError):
        streamer.load(model, source_of({"weight": torch.ones(100, 100)}))
    del model
    gc.collect()
    assert gone() is None
