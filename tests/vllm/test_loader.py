"""The loader and what surrounds it, in this process, on the oldest and the newest vLLM that we support."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from streamer.artifacts.digests import make_manifest
from streamer.checkpoint.manifest import MANIFEST_KEY
from streamer.config import StreamConfig
from streamer.errors import (
    CheckpointError,
    ConfigError,
    IncompleteCheckpointError,
    IntegrityError,
    MissingDependencyError,
    MissingParametersError,
    ObjectChangedError,
    UnsupportedCheckpointError,
)
from streamer.sources import open_source
from tests.servers.object_server import ObjectServer
from tests.tensors import differences, tensors_of
from tests.vllm.cases import Case
from tests.vllm.host import Built, build, finalize, load_default, loading

Get = Callable[[str], tuple[Case, Path]]
URL = "s3://models/org/m"


@pytest.fixture(autouse=True)
def plugin(gated_layers: None) -> None:
    from vllm_s3stream import register

    register()


def loader_for(**extra: Any) -> Any:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    return get_model_loader(LoadConfig(load_format="s3stream", use_tqdm_on_load=False, model_loader_extra_config=extra))


def load_ours(built: Built, **extra: Any) -> Any:
    loader = loader_for(**extra)
    with loading(built):
        loader.load_weights(built.model, built.model_config)
    finalize(built)
    return loader.report


def engine_config(model: str, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    chosen = {"load_format": "s3stream", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 128}
    return EngineArgs(model=model, **{**chosen, **arguments}).create_engine_config()


@pytest.fixture
def store(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return server


# -- registration -----------------------------------------------------------------------------------------


def test_registering_twice_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_s3stream import register
    from vllm_s3stream.loader import S3StreamLoader

    before = EngineArgs.create_engine_config
    with caplog.at_level(logging.WARNING):
        register()
    assert EngineArgs.create_engine_config is before
    assert not caplog.records
    assert type(loader_for()) is S3StreamLoader


def test_the_plugin_is_an_entry_point() -> None:
    from importlib.metadata import entry_points

    (entry,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "s3stream"]
    assert entry.value == "vllm_s3stream:register"


@pytest.mark.parametrize(
    ("version", "warned"), [("0.27.1", True), ("0.28.0", False), ("0.32.4+cpu", False), ("1.0", True)]
)
def test_untested_versions_are_tried_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warned: bool
) -> None:
    import vllm

    from vllm_s3stream.versions import warn_if_untested

    monkeypatch.setattr(vllm, "__version__", version)
    logger = logging.getLogger("vllm.s3stream")
    logger.addHandler(caplog.handler)
    warn_if_untested()
    logger.removeHandler(caplog.handler)
    assert bool(caplog.records) == warned


def test_a_vllm_that_is_built_otherwise_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    monkeypatch.delattr(DefaultModelLoader, "_prepare_weights")
    with pytest.raises(MissingDependencyError, match=r"has no _prepare_weights .*tested with vLLM 0\.28 to 0\.32"):
        loader_for()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"concurency": 4}, "unknown option 'concurency'.*did you mean concurrency"),
        ({"mode": "lazy"}, "mode must be one of"),
        ({"sharded": "yes"}, "sharded must be true or false"),
        ({"pattern": "x.safetensors"}, "set sharded=true"),
        ({"pattern": "x.bin", "sharded": True}, "ending in .safetensors"),
        ({"enable_weights_track": 1}, "enable_weights_track must be"),
    ],
)
def test_every_option_is_checked(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader_for(**extra)


# -- URLs -------------------------------------------------------------------------------------------------


def test_a_url_becomes_a_folder_and_the_loader_finds_the_weights(store: ObjectServer, checkpoint: Get) -> None:
    case, folder = checkpoint("llama_sharded")
    store.put_folder("models", "org/m/", folder)
    config = engine_config(URL)
    pulled = Path(config.model_config.model)
    assert (pulled / "config.json").is_file()
    assert not list(pulled.glob("*.safetensors"))
    assert config.model_config.served_model_name == URL
    assert config.model_config.tokenizer == str(pulled)
    for tensor, rank in ((1, 0), (2, 1)):
        expected = build(folder, case, tensor=tensor, rank=rank)
        load_default(expected)
        listings = store.counters.requests["LIST"]
        built = build(pulled, case, tensor=tensor, rank=rank)
        report = load_ours(built, verify=True, coalesce_gap_bytes=0)
        assert not differences(tensors_of(expected.model), tensors_of(built.model))
        assert store.counters.requests["LIST"] == listings  # one listing, the parent's, pins all ranks
        assert report.url == f"{URL}/"
        assert report.verified.copies == report.copies
        assert report.fetched_bytes == report.needed_bytes + report.over_read_bytes


def test_weights_are_held_against_a_manifest(store: ObjectServer, checkpoint: Get) -> None:
    case, folder = checkpoint("llama_sharded")
    store.put_folder("models", "org/m/", folder)
    source = open_source(URL, StreamConfig.resolve())
    manifest = asyncio.run(make_manifest(source, StreamConfig(), block_bytes=4096))
    store.put("models", f"org/m/{MANIFEST_KEY}", manifest.to_json())
    extra = {"integrity": "manifest"}
    expected = build(folder, case, tensor=2, rank=1)
    load_default(expected)
    built = build(Path(engine_config(URL, model_loader_extra_config=extra).model_config.model), case, tensor=2, rank=1)
    load_ours(built, **extra)
    assert not differences(tensors_of(expected.model), tensors_of(built.model))
    shard = "model-00002-of-00003.safetensors"
    body = bytearray((folder / shard).read_bytes())
    body[-1] ^= 1
    store.put("models", f"org/m/{shard}", bytes(body))
    pulled = Path(engine_config(URL, model_loader_extra_config=extra).model_config.model)
    with pytest.raises(IntegrityError, match=re.escape(f"{URL}/{shard} bytes")):
        load_ours(build(pulled, case, tensor=1, rank=0), **extra)


def test_what_was_replaced_since_the_url_was_resolved_is_refused(store: ObjectServer, checkpoint: Get) -> None:
    case, folder = checkpoint("llama_sharded")
    store.put_folder("models", "org/m/", folder)
    pulled = Path(engine_config(URL).model_config.model)
    shard = "model-00002-of-00003.safetensors"
    body = bytearray((folder / shard).read_bytes())
    body[-1] ^= 1
    store.put("models", f"org/m/{shard}", bytes(body))
    with pytest.raises(ObjectChangedError, match=re.escape(f"{URL}/{shard}")):
        load_ours(build(pulled, case, tensor=1, rank=0))


def test_with_versions_what_was_replaced_is_loaded_as_it_was(
    store: ObjectServer, checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole models, on rank 1, and a subfolder that a model's own code names."""
    monkeypatch.setenv("S3STREAM_PIN", "version")
    store.is_versioned = True
    case, folder = checkpoint("llama_sharded")
    store.put_folder("models", "org/m/", folder)
    head = write(tmp_path / "head", {"x.safetensors": state("h", first=5)}) / "x.safetensors"
    store.put("models", "org/m/head/x.safetensors", head.read_bytes())
    pulled = Path(engine_config(URL).model_config.model)
    for key in list(store.objects["models"]):
        if key.endswith(".safetensors"):
            store.put("models", key, b"something else")
    ours, theirs = (build(path, case, tensor=2, rank=1) for path in (pulled, folder))
    load_ours(ours)
    load_default(theirs)
    assert not differences(tensors_of(theirs.model), tensors_of(ours.model))
    below = Collector(secondary_weights=[source(pulled, subfolder="head")])
    assert seen_by(below, ours)["h"] == 5.0


def test_revisions_are_folders(store: ObjectServer, checkpoint: Get) -> None:
    _, folder = checkpoint("llama")
    store.put_folder("models", "org/m/v2/", folder)
    config = engine_config(URL, revision="v2").model_config
    assert config.served_model_name == URL
    assert config.revision is None
    assert load_ours(build(Path(config.model), checkpoint("llama")[0], tensor=1, rank=0)).url == f"{URL}/v2/"


def test_tokenizers_and_configurations_have_urls_of_their_own(store: ObjectServer, checkpoint: Get) -> None:
    _, folder = checkpoint("llama")
    store.put_folder("models", "org/m/", folder)
    store.put("models", "tok/nested/tokenizer.json", b"{}")
    config = engine_config(URL, tokenizer="s3://models/tok", hf_config_path=URL).model_config
    assert (Path(config.tokenizer) / "nested" / "tokenizer.json").is_file()
    assert config.hf_config_path == config.model
    names = ["theirs", "alias"]
    assert engine_config(URL, served_model_name=names).model_config.served_model_name == "theirs"


def test_other_load_formats_are_left_alone(checkpoint: Get) -> None:
    _, folder = checkpoint("llama")
    config = engine_config(str(folder), load_format="auto").model_config
    assert (config.model, config.served_model_name) == (str(folder), str(folder))


def test_any_url_of_fsspec_is_a_model_path(checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when vLLM is told that there is no hub, which it would look such names up in."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    case, folder = checkpoint("llama_sharded")
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"org/m/{path.name}")
    config = engine_config(f"zip://org/m::file://{tmp_path}/m.zip").model_config
    expected, built = build(folder, case, tensor=2, rank=1), build(Path(config.model), case, tensor=2, rank=1)
    load_default(expected)
    assert load_ours(built).url == f"zip://org/m::file://{tmp_path}/m.zip"
    assert not differences(tensors_of(expected.model), tensors_of(built.model))


def test_schemes_that_are_not_supported_are_named() -> None:
    with pytest.raises(ConfigError, match="nosuch://host/m: fsspec has no filesystem for this URL"):
        engine_config("nosuch://host/m")


def test_options_of_the_engine_reach_the_store(server: ObjectServer, checkpoint: Get) -> None:
    """Without any variable: endpoint and region come from the extra configuration alone."""
    case, folder = checkpoint("llama_tied_dup_lmhead")
    server.put_folder("models", "org/m/", folder)
    extra = {"endpoint_url": server.url, "region": "us-east-1"}
    pulled = Path(engine_config(URL, model_loader_extra_config=extra).model_config.model)
    assert load_ours(build(pulled, case, tensor=1, rank=0), **extra).checkpoint_bytes


@pytest.mark.parametrize(("name", "tied"), [("llama_tied", True), ("llama_tied_dup_lmhead", None)])
def test_ties_follow_the_checkpoint_as_from_disk(
    store: ObjectServer, checkpoint: Get, name: str, tied: bool | None
) -> None:
    _, folder = checkpoint(name)
    store.put_folder("models", "org/m/", folder)
    local = engine_config(str(folder), load_format="auto").model_config.hf_config
    ours = engine_config(URL).model_config.hf_config
    assert ours.tie_word_embeddings == local.tie_word_embeddings
    assert tied is None or ours.tie_word_embeddings == tied


def test_adapters_are_brought_here_whole(store: ObjectServer, tmp_path: Path) -> None:
    from vllm.lora import worker_manager

    store.put("models", "a/adapter_config.json", b"{}")
    store.put("models", "a/adapter_model.safetensors", b"abc")
    folder = Path(worker_manager.get_adapter_absolute_path("s3://models/a"))
    assert (folder / "adapter_model.safetensors").read_bytes() == b"abc"
    assert worker_manager.get_adapter_absolute_path(str(tmp_path)) == str(tmp_path)


def test_mistral_format_is_recognised_from_names_alone(store: ObjectServer, checkpoint: Get, tmp_path: Path) -> None:
    from vllm.transformers_utils.repo_utils import is_mistral_model_repo

    files = {"consolidated.safetensors": state("theirs"), "model.safetensors": state("ours")}
    folder = write(tmp_path / "m", files)
    (folder / "config.json").write_bytes((checkpoint("llama")[1] / "config.json").read_bytes())
    for params, seen in ((False, {"ours"}), (True, {"theirs"})):
        if params:
            (folder / "params.json").write_text("{}")
        store.put_folder("models", "org/m/", folder)
        pulled = Path(engine_config(URL, config_format="hf").model_config.model)
        assert is_mistral_model_repo(str(pulled))
        for path in (pulled, folder):
            assert set(seen_by(Collector(), build(path, checkpoint("llama")[0], tensor=1, rank=0))) == seen


# -- sources, filters, checks -------------------------------------------------------------------------------


class Collector(nn.Module):
    """A model that keeps what it is given."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(64), requires_grad=False)
        self.seen: dict[str, torch.Tensor] = {}
        vars(self).update(attributes)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.seen.clear()
        for name, tensor in weights:
            self.norm.copy_(tensor.reshape(-1)[:64])
            self.seen[name] = torch.tensor(tensor.tolist())
        return {"norm"}


def state(*names: str, first: int = 0) -> dict[str, torch.Tensor]:
    return {name: torch.full((8, 8), float(first + number)) for number, name in enumerate(names)}


def write(folder: Path, files: dict[str, dict[str, torch.Tensor]]) -> Path:
    for key, tensors in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, folder / key)
    return folder


@pytest.fixture
def host(checkpoint: Get) -> Callable[[Path], Built]:
    """Return a function that gives a configuration whose weights are in a folder."""
    case, folder = checkpoint("llama")

    def configured(weights: Path) -> Built:
        (weights / "config.json").write_bytes((folder / "config.json").read_bytes())
        return build(weights, case, tensor=1, rank=0)

    return configured


def seen_by(model: Collector, built: Built, **extra: Any) -> dict[str, float]:
    loader = loader_for(**extra)
    with loading(built):
        loader.load_weights(model, built.model_config)
    return {name: float(value.reshape(-1)[0]) for name, value in model.seen.items()}


def source(path: Path, **fields: Any) -> Any:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return DefaultModelLoader.Source(str(path), None, **fields)


def test_secondary_weights_keep_their_names_and_sources(tmp_path: Path, host: Callable[[Path], Built]) -> None:
    built = host(write(tmp_path / "first", {"model.safetensors": state("a", "b")}))
    other = write(tmp_path / "second", {"model.safetensors": state("a", "c", first=10)})
    nested = write(tmp_path / "third", {"sub/model.safetensors": state("a", first=20)})
    model = Collector(
        secondary_weights=[source(other, prefix="other."), source(nested, subfolder="sub", prefix="nested.")]
    )
    assert seen_by(model, built) == {"a": 0.0, "b": 1.0, "other.a": 10.0, "other.c": 11.0, "nested.a": 20.0}
    assert seen_by(model, built, mode="eager")["nested.a"] == 20.0


def test_secondary_weights_of_a_url(
    store: ObjectServer, tmp_path: Path, host: Callable[[Path], Built], checkpoint: Get
) -> None:
    """Models name their own path again, with another subfolder or pattern (kimi_audio, clef_omni)."""
    folder = write(tmp_path / "m", {"model.safetensors": state("a"), "head/x.safetensors": state("h", first=5)})
    (folder / "config.json").write_bytes((checkpoint("llama")[1] / "config.json").read_bytes())
    store.put_folder("models", "org/m/", folder)
    pulled = Path(engine_config(URL).model_config.model)
    built = build(pulled, checkpoint("llama")[0], tensor=1, rank=0)
    below = Collector(secondary_weights=[source(pulled, subfolder="head")])
    assert seen_by(below, built) == {"a": 0.0, "h": 5.0}
    chosen = Collector(secondary_weights=[source(pulled, allow_patterns_overrides=["none*", "h*/*.safetensors"])])
    assert seen_by(chosen, built) == {"a": 0.0, "h": 5.0}


def test_patterns_of_the_model_choose_files(tmp_path: Path, host: Callable[[Path], Built]) -> None:
    files = {
        "model.safetensors": state("a"),
        "vision/v.safetensors": state("v"),
        "vision/deep/w.safetensors": state("w"),
    }
    built = host(write(tmp_path / "m", files))
    assert set(seen_by(Collector(allow_patterns_overrides=["[tv]*on/*.safetensors"]), built)) == {"v"}
    with pytest.raises(CheckpointError, match=r"no files that match nothing\*"):
        seen_by(Collector(allow_patterns_overrides=["nothing*"]), built)
    (tmp_path / "m" / "head.pt").write_bytes(b"pickle")
    with pytest.raises(UnsupportedCheckpointError, match=r"needs head\.pt, and pickled weights are never opened"):
        seen_by(Collector(allow_patterns_overrides=["head.pt"]), built)


def test_ignored_patterns_are_left_out_of_urls(store: ObjectServer, tmp_path: Path, checkpoint: Get) -> None:
    """As they are left out of what vLLM downloads from the hub; a local folder is taken as it is."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    case, original = checkpoint("llama")
    folder = write(tmp_path / "m", {"model-a.safetensors": state("a"), "model-b.safetensors": state("b")})
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    store.put_folder("models", "org/m/", folder)
    for path, seen in ((Path(engine_config(URL).model_config.model), {"a"}), (folder, {"a", "b"})):
        built = build(path, case, tensor=1, rank=0)
        model = Collector()
        with loading(built):
            config = LoadConfig(load_format="s3stream", ignore_patterns=["*-b.*"], use_tqdm_on_load=False)
            get_model_loader(config).load_weights(model, built.model_config)
        assert set(model.seen) == seen


def test_files_without_anything_wanted_are_not_shown(tmp_path: Path, host: Callable[[Path], Built]) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    files = {"model-1.safetensors": state("draft.a", "b"), "model-2.safetensors": state("b2", "b3")}
    built = host(write(tmp_path / "m", files))
    shown = seen_by(Collector(is_unused_checkpoint_weight=lambda name: not name.startswith("draft")), built)
    filters = "is_unused_weight" in DefaultModelLoader.Source.__dataclass_fields__  # since 0.32
    assert set(shown) == ({"draft.a", "b"} if filters else {"draft.a", "b", "b2", "b3"})
    assert len(seen_by(Collector(is_unused_checkpoint_weight=lambda name: True), built)) == 4


def test_language_model_files_are_left_out_for_encoders(tmp_path: Path) -> None:
    from vllm.model_executor.model_loader import weight_utils

    from streamer.artifacts.locate import locate
    from streamer.session import LoadSession
    from vllm_s3stream.weights import ShardFilter

    if not hasattr(weight_utils, "filter_mm_encoder_only_safetensors_files"):
        pytest.skip("vLLM before 0.31 has no such filter, and its loader no such attribute")
    folder = write(
        tmp_path / "m",
        {"model-1.safetensors": state("visual.a", "language.b"), "model-2.safetensors": state("language.c")},
    )
    index = {
        "visual.a": "model-1.safetensors",
        "language.b": "model-1.safetensors",
        "language.c": "model-2.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    options = loader_for()._options.stream

    def names(*prefixes: str) -> list[str]:
        keep = ShardFilter(
            folder, is_unused=None, encoder_only_prefixes=prefixes, weights_mapper=None, local_expert_ids=None
        )
        with LoadSession(None, options) as session:
            located = locate(str(folder), None, None, options, lambda *_: ("", []))
            return [info.name for info in session.open(located.source(options), keep=keep).tensors]

    assert names("language.") == ["language.b", "visual.a"]
    with pytest.raises(CheckpointError, match="every file holds the language model only"):
        names("language.", "visual.")


def test_experts_of_other_ranks_are_not_shown(checkpoint: Get) -> None:
    case, folder = checkpoint("mixtral_sharded_ep")
    built = build(folder, case, tensor=2, rank=1)
    built.vllm_config.parallel_config.enable_ep_weight_filter = True
    report = load_ours(built)
    expected = build(folder, case, tensor=2, rank=1)
    load_default(expected)
    assert not differences(tensors_of(expected.model), tensors_of(built.model))
    assert not any("experts.0." in name for name in report.ignored)
    without = load_ours(build(folder, case, tensor=2, rank=1))
    assert any("experts.0." in name for name in without.ignored)
    assert without.needed_bytes == report.needed_bytes  # the trace needs no filter to fetch the same


def test_missing_weights_are_named_with_the_nearest(
    tmp_path: Path, host: Callable[[Path], Built], checkpoint: Get
) -> None:
    tensors = safetensors.torch.load_file(checkpoint("llama")[1] / "model.safetensors")
    tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")
    del tensors["model.final_norm.weight"]
    built = host(write(tmp_path / "m", {"model.safetensors": tensors}))
    with pytest.raises(MissingParametersError, match=r"no values for 1 parameters: model\.norm\.weight"):
        load_ours(built)
    report = load_ours(host(tmp_path / "m"), strict=False)
    assert set(report.expected) - set(report.loaded) == {"model.norm.weight"}


def test_repositories_of_the_hub_are_downloaded_by_vllm(
    tmp_path: Path, host: Callable[[Path], Built], checkpoint: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    case, folder = checkpoint("llama_sharded")
    prepare = DefaultModelLoader._prepare_weights
    asked = []

    def from_cache(self: Any, name: str, subfolder: Any, revision: Any, pt: bool, patterns: Any) -> Any:
        asked.append((name, revision))
        return prepare(self, str(folder), subfolder, revision, pt, patterns)

    monkeypatch.setattr(DefaultModelLoader, "_prepare_weights", from_cache)
    expected, built = build(folder, case, tensor=2, rank=1), build(folder, case, tensor=2, rank=1)
    load_default(expected)
    asked.clear()
    built.model_config.model, built.model_config.revision = "org/name", "abc"
    loader = loader_for()
    loader.download_model(built.model_config)
    with loading(built):
        loader.load_weights(built.model, built.model_config)
    assert asked == [("org/name", "abc")] * 2
    assert not differences(tensors_of(expected.model), tensors_of(built.model))


def test_weights_read_outside_a_load_are_real(checkpoint: Get) -> None:
    """As vLLM does when it reloads a model in place."""
    case, folder = checkpoint("llama_sharded")
    built = build(folder, case, tensor=1, rank=0)
    loader = loader_for()
    with loading(built):
        weights = dict(loader.get_all_weights(built.model_config, built.model))
    stored = {}
    for path in folder.glob("*.safetensors"):
        stored.update(safetensors.torch.load_file(path))
    assert not differences(weights, stored)


# -- sharded state --------------------------------------------------------------------------------------------


def save_sharded(folder: Path, case: Case, original: Path, ranks: int, **options: Any) -> list[Built]:
    """Write a state dict per rank as vLLM does; return the models."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    models = []
    for rank in range(ranks):
        built = build(original, case, tensor=ranks, rank=rank)
        load_default(built)
        with loading(built):
            ShardedStateLoader.save_model(built.model, str(folder), **options)
        models.append(built)
    return models


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral"])
def test_sharded_state_is_read_by_rank(store: ObjectServer, checkpoint: Get, tmp_path: Path, name: str) -> None:
    case, original = checkpoint(name)
    saved = save_sharded(tmp_path / "s", case, original, 2, max_size=100_000)
    store.put_folder("models", "org/m/", tmp_path / "s")
    config = engine_config(URL, model_loader_extra_config={"sharded": True})
    if name == "llama_tied":
        assert config.model_config.hf_config.tie_word_embeddings
    pulled = Path(config.model_config.model)
    for rank in (0, 1):
        built = build(pulled, case, tensor=2, rank=rank)
        report = load_ours(built, sharded=True)
        assert not differences(tensors_of(saved[rank].model), tensors_of(built.model))
        assert (
            report.needed_bytes == report.checkpoint_bytes < sum(p.stat().st_size for p in (tmp_path / "s").iterdir())
        )


def test_sharded_state_of_other_ranks_is_refused(checkpoint: Get, tmp_path: Path) -> None:
    case, original = checkpoint("llama")
    save_sharded(tmp_path / "s", case, original, 2)
    with pytest.raises(IncompleteCheckpointError) as caught:
        load_ours(build(tmp_path / "s", case, tensor=1, rank=0), sharded=True)
    message = str(caught.value)
    assert "model-rank-{rank}-part-{part}.safetensors for tensor-parallel ranks 0, 1" in message
    assert "this engine has tensor-parallel ranks 0 " in message
    with pytest.raises(IncompleteCheckpointError, match=r"x-\{tp_rank\}\.\{part\}\.safetensors for no rank at all"):
        load_ours(build(tmp_path / "s", case, tensor=2, rank=0), sharded=True, pattern="x-{tp_rank}.{part}.safetensors")
    with pytest.raises(ConfigError, match="unknown fields host"):
        load_ours(build(tmp_path / "s", case, tensor=2, rank=0), sharded=True, pattern="{host}-{part}.safetensors")


def test_sharded_state_with_a_pattern_of_its_own(checkpoint: Get, tmp_path: Path) -> None:
    case, original = checkpoint("llama")
    pattern = "shard_{rank}_{part}.safetensors"
    saved = save_sharded(tmp_path / "s", case, original, 2, pattern=pattern)
    built = build(tmp_path / "s", case, tensor=2, rank=1)
    load_ours(built, sharded=True, pattern=pattern, mode="eager")
    assert not differences(tensors_of(saved[1].model), tensors_of(built.model))


def test_sharded_state_that_lacks_a_tensor_is_refused(checkpoint: Get, tmp_path: Path) -> None:
    case, original = checkpoint("llama")
    save_sharded(tmp_path / "s", case, original, 1)
    path = tmp_path / "s" / "model-rank-0-part-0.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(IncompleteCheckpointError, match=r"lack 1 tensors: model\.norm\.weight"):
        load_ours(build(tmp_path / "s", case, tensor=1, rank=0), sharded=True)


# -- what a load tells ----------------------------------------------------------------------------------------


def test_reports_progress_and_log_lines(
    checkpoint: Get, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    case, folder = checkpoint("qwen2_moe")
    for mode in ("trace", "eager"):
        extra = {"report_dir": str(tmp_path / mode), "mode": mode}
        loader = get_model_loader(LoadConfig(load_format="s3stream", model_loader_extra_config=extra))
        built = build(folder, case, tensor=2, rank=1)
        logger = logging.getLogger("vllm")
        logger.addHandler(caplog.handler)
        with loading(built):
            loader.load_weights(built.model, built.model_config)
        logger.removeHandler(caplog.handler)
        assert re.search(r"Loading weights: 100%.*B/s", capfd.readouterr().err)
        assert any(record.getMessage().startswith("s3stream: Loading weights took") for record in caplog.records)
        (path,) = (tmp_path / mode).iterdir()
        written = json.loads(path.read_text())
        assert (written["rank"], written["mode"]) == (0, mode)
        assert set(written["loaded"]) == set(written["expected"])
        assert written["needed_bytes"] == loader.report.needed_bytes
        caplog.clear()


@pytest.mark.parametrize("lacks", ["nothing", "a file", "a tensor"])
def test_metrics_and_reports_of_loads_however_they_end(checkpoint: Get, tmp_path: Path, lacks: str) -> None:
    case, folder = checkpoint("llama")
    url = tmp_path / "m"
    url.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            (url / path.name).write_bytes(path.read_bytes())
    tensors = {k: v for path in folder.glob("*.safetensors") for k, v in safetensors.torch.load_file(path).items()}
    if lacks == "a tensor":
        del tensors["model.norm.weight"]
    if lacks != "a file":
        safetensors.torch.save_file(tensors, url / "model.safetensors")
    options = {"metrics_file": str(tmp_path / "{model}-{rank}.prom"), "report_file": str(tmp_path / "report.json")}
    built = build(folder, case, tensor=2, rank=1)
    built.model_config.model = str(url)
    ended = {"nothing": None, "a file": ("CheckpointError", "headers"), "a tensor": ("MissingParametersError", "check")}
    if ended[lacks] is None:
        load_ours(built, **options)
    else:
        with pytest.raises((CheckpointError, MissingParametersError)):
            load_ours(built, **options)
    document = json.loads((tmp_path / "report.json").read_text())
    text = (tmp_path / "m-0.prom").read_text()
    assert document["ok"] == (lacks == "nothing")
    assert re.search(rf"^s3stream_load_success{{.*}} {float(document['ok'])}$", text, re.MULTILINE)
    if ended[lacks] is not None:
        assert (document["failure"]["error"], document["failure"]["phase"]) == ended[lacks]
    assert ("s3stream_load_phase_seconds{" in text) == (lacks != "a file")


def test_quantised_checkpoints_show_what_was_dropped(checkpoint: Get) -> None:
    case, folder = checkpoint("llama_gptq")
    report = load_ours(build(folder, case, tensor=2, rank=1))
    dropped = [name for name in report.ignored if name.endswith("g_idx")]
    assert dropped
    assert all(report.ignored[name] for name in dropped)
