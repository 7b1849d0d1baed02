"""Before an update: what is to be loaded fits, what is served can be read again, and all ranks agree."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

from streamer.artifacts.digests import make_manifest
from streamer.artifacts.locate import Located, locate
from streamer.checkpoint.manifest import MANIFEST_KEY
from streamer.config import StreamConfig
from streamer.errors import CheckpointError, LoadError, ObjectChangedError, SourceUnavailableError, StreamError
from streamer.fetch.engine import FetchEngine
from streamer.sources.memory import MemorySource
from streamer.update.revision import Revision, examine
from streamer.update.rules import different_settings, refuse_lost, refuse_other_model
from streamer.update.vote import vote
from tests.servers.object_server import Fault, ObjectServer, error_response
from tests.share.together import Meeting, ThreadGroup

SHAPES = {"a.weight": (4, 3), "b.weight": (2,)}


def weights(shapes: Mapping[str, tuple[int, ...]], value: float = 1.0, dtype: torch.dtype = torch.float32) -> bytes:
    return safetensors.torch.save({name: torch.full(shape, value, dtype=dtype) for name, shape in shapes.items()})


def config_for(server: ObjectServer, tmp_path: Path, **options: object) -> StreamConfig:
    return StreamConfig.resolve({"endpoint_url": server.url, "cache_dir": str(tmp_path / "cache"), **options})


def found(model: str, config: StreamConfig) -> Located:
    return locate(model, None, None, config, lambda *_: pytest.fail("the hub was asked"))


def revision_of(model: str, config: StreamConfig) -> Revision:
    located = found(model, config)
    return examine(located.source(config), located, config)


def put(server: ObjectServer, name: str, body: bytes, **settings: object) -> str:
    server.put("models", f"{name}/config.json", json.dumps(settings).encode())
    server.put("models", f"{name}/model.safetensors", body)
    return f"s3://models/{name}"


def test_a_revision_tells_what_the_headers_say(server: ObjectServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path)
    revision = revision_of(put(server, "v1", weights(SHAPES)), config)
    assert revision.tensors == {"a.weight": ("F32", (4, 3)), "b.weight": ("F32", (2,))}
    assert revision.files == ("model.safetensors",)
    assert (revision.folder / "config.json").is_file()
    assert revision.named("7").version == "7"
    assert revision.named("7").is_same(revision)


@pytest.mark.parametrize("integrity", ["store", "manifest"])
def test_a_folder_is_pinned_too(tmp_path: Path, integrity: str) -> None:
    config = StreamConfig.resolve({"integrity": integrity})
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights(SHAPES))
    if integrity == "manifest":
        files = {path.name: path.read_bytes()}
        manifest = asyncio.run(make_manifest(MemorySource(files), StreamConfig()))
        (tmp_path / MANIFEST_KEY).write_bytes(manifest.to_json())
    located = found(str(tmp_path), StreamConfig.resolve())
    with FetchEngine(located.source(config), config) as engine:
        serving = Revision.of(located, engine, engine.open_checkpoint())
    refuse_lost(serving, config)
    path.write_bytes(weights(SHAPES, 2.0))
    assert not revision_of(str(tmp_path), StreamConfig.resolve()).is_same(serving)
    with pytest.raises(ObjectChangedError, match="no way back"):
        refuse_lost(serving, config)


def test_a_file_replaced_since_it_was_read_is_not_taken_for_what_was(tmp_path: Path) -> None:
    config = StreamConfig.resolve()
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights(SHAPES))
    located = found(str(tmp_path), config)
    with FetchEngine(located.source(config), config) as engine:
        opened = engine.open_checkpoint()
        path.write_bytes(weights(SHAPES, 2.0))
        serving = Revision.of(located, engine, opened)
    with pytest.raises(ObjectChangedError):
        refuse_lost(serving, config)


@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        ({"a.weight": SHAPES["a.weight"]}, torch.float32, r"lacks 1 of its tensors: b\.weight"),
        ({**SHAPES, "c": (1,)}, torch.float32, "has 1 that it has not: c"),
        ({**SHAPES, "a.weight": (3, 4)}, torch.float32, r"a\.weight \(F32 \[3, 4\], not F32 \[4, 3\]\)"),
        (SHAPES, torch.bfloat16, "has 2 with another dtype or shape"),
    ],
)
def test_another_model_is_refused(
    server: ObjectServer,
    tmp_path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    message: str,
) -> None:
    config = config_for(server, tmp_path)
    serving = revision_of(put(server, "v1", weights(SHAPES)), config)
    refuse_other_model(serving, revision_of(put(server, "v2", weights(SHAPES, 2.0)), config))
    new = revision_of(put(server, "v3", weights(shapes, dtype=dtype)), config)
    with pytest.raises(CheckpointError, match=message):
        refuse_other_model(serving, new)


@pytest.mark.parametrize("new", ["same", "other", "none"])
def test_weights_beside_the_model_must_be_the_same(server: ObjectServer, tmp_path: Path, new: str) -> None:
    config = config_for(server, tmp_path)
    urls = [put(server, name, weights(SHAPES)) for name in ("v1", "v2")]
    server.put("models", "v1/2_Dense/model.safetensors", b"same")
    if new != "none":
        server.put("models", "v2/2_Dense/model.safetensors", new.encode())
    serving, found = (revision_of(url, config) for url in urls)
    if new == "same":
        refuse_other_model(serving, found)
        return
    with pytest.raises(CheckpointError, match=r"other weights beside the model's.*2_Dense/model\.safetensors"):
        refuse_other_model(serving, found)


def test_what_is_served_must_be_there_to_return_to(server: ObjectServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path)
    serving = revision_of(put(server, "v1", weights(SHAPES)), config)
    refuse_lost(serving, config)
    put(server, "v1", weights(SHAPES, 2.0))
    with pytest.raises(ObjectChangedError, match="no way back to what is served now"):
        refuse_lost(serving, config)


def test_in_a_bucket_with_versions_what_was_replaced_is_still_there(server: ObjectServer, tmp_path: Path) -> None:
    server.is_versioned = True
    config = config_for(server, tmp_path, pin="version")
    serving = revision_of(put(server, "v1", weights(SHAPES)), config)
    put(server, "v1", weights(SHAPES, 2.0))
    refuse_lost(serving, config)


def test_a_store_that_fails_says_for_what_it_was_asked(server: ObjectServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path, retry_deadline_seconds=1.0)
    serving = revision_of(put(server, "v1", weights(SHAPES)), config)
    server.faults.append(Fault(lambda *_: error_response(503, "SlowDown"), times=None))
    with pytest.raises(SourceUnavailableError, match="what is served now could not be read again"):
        refuse_lost(serving, config)


def test_different_settings_are_named(server: ObjectServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path)
    first = revision_of(put(server, "v1", weights(SHAPES), rope_theta=1, hidden=2, transformers_version="4"), config)
    second = revision_of(put(server, "v2", weights(SHAPES), rope_theta=9, hidden=2, transformers_version="5"), config)
    assert different_settings(first.folder, second.folder) == ["rope_theta"]
    assert different_settings(first.folder, tmp_path) == []


# -- the vote --------------------------------------------------------------------------------------------------


def on_all(size: int, ballot: Callable[[int], tuple[str, BaseException | None, bytes]]) -> list[BaseException | None]:
    meeting = Meeting(size)
    outcomes: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        purpose, error, digest = ballot(rank)
        try:
            config = StreamConfig(share_timeout_seconds=20.0)
            vote(ThreadGroup(rank, meeting), config, purpose, error=error, ballot=digest)
        except BaseException as raised:
            outcomes[rank] = raised

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes


def test_all_go_on_if_all_are_well() -> None:
    assert on_all(3, lambda rank: ("update", None, b"same")) == [None] * 3


@pytest.mark.parametrize("error", [CheckpointError("it is bad"), AssertionError("shapes differ")])
def test_one_rank_that_fails_stops_all_with_its_error(error: BaseException) -> None:
    outcomes = on_all(3, lambda rank: ("update", error if rank == 1 else None, b"same"))
    kind = CheckpointError if isinstance(error, CheckpointError) else LoadError
    for outcome in outcomes:
        assert isinstance(outcome, kind)
        assert isinstance(outcome, StreamError)
        assert outcome.rank == 1
        assert str(error) in str(outcome)
        assert "on rank 1" in str(outcome)


def test_ranks_that_see_different_objects_do_not_go_on() -> None:
    outcomes = on_all(2, lambda rank: ("update", None, bytes([rank])))
    assert all("do not see the same objects" in str(outcome) for outcome in outcomes)


def test_ranks_in_different_places_do_not_go_on() -> None:
    outcomes = on_all(2, lambda rank: (f"step {rank}", None, b""))
    assert all("vote on different things: step 0, step 1" in str(outcome) for outcome in outcomes)


def test_a_rank_that_is_alone_raises_its_own() -> None:
    vote(None, StreamConfig(), "update")
    with pytest.raises(AssertionError, match="mine"):
        vote(None, StreamConfig(), "update", error=AssertionError("mine"))
