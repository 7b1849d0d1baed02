"""The loader, in this process: what it loads is byte for byte what SGLang's default loader does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn

from sglang_s3stream.parallel import pretend
from sglang_s3stream.weights import LayerOfSeveral, files_to_load
from streamer.artifacts.locate import locate
from streamer.config import StreamConfig
from streamer.errors import IncompleteCheckpointError, MissingParametersError, ObjectNotFoundError
from streamer.session import LoadSession
from tests.servers.object_server import ObjectServer
from tests.sglang.cases import CASES, Case, write_checkpoint
from tests.sglang.host import load, server_arguments
from tests.tensors import differences, tensors_of
from tests.vllm import serving

Get = Callable[[str], tuple[Case, Path]]

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_bytes_are_those_of_the_default_loader(checkpoint: Get, name: str) -> None:
    case, folder = checkpoint(name)
    expected = tensors_of(load(folder, load_format="auto", **case.arguments).model)
    for mode in ("trace", "eager"):
        loaded = load(folder, extra={"mode": mode, "verify": mode == "trace"}, **case.arguments)
        assert not differences(expected, tensors_of(loaded.model))
        assert loaded.loader.report.mode == mode


def test_only_a_ranks_bytes_are_fetched(checkpoint: Get, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    case, folder = checkpoint("deepseek_v3")
    server.put_folder("models", "org/m/", folder)
    expected = tensors_of(load(folder, load_format="auto", **case.arguments).model)
    loaded = load("s3://models/org/m", extra={"coalesce_gap_bytes": 0}, **case.arguments)
    assert not differences(expected, tensors_of(loaded.model))
    report = loaded.loader.report
    assert report.url.rstrip("/") == "s3://models/org/m"
    assert not report.materialised
    assert report.fetched_bytes == report.needed_bytes < 0.7 * report.checkpoint_bytes


def test_what_sglang_leaves_without_values_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang's own loader serves such a model with whatever lay in memory."""
    write_checkpoint(CASES[0], tmp_path)
    first = tmp_path / "model-00001-of-00002.safetensors"
    tensors = safetensors.torch.load_file(first)
    lacking = [name for name in tensors if name.endswith("o_proj.weight")]
    assert lacking
    safetensors.torch.save_file({name: t for name, t in tensors.items() if name not in lacking}, first)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in lacking}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    left = tensors_of(load(tmp_path, load_format="auto").model)[lacking[0]]
    assert left.isnan().all()
    for mode in ("trace", "eager"):
        with pytest.raises(MissingParametersError) as raised:
            load(tmp_path, extra={"mode": mode})
        assert list(raised.value.names) == lacking
    caplog.clear()
    load(tmp_path, extra={"strict": False})
    assert [record for record in caplog.records if f"{lacking[0]}" in record.getMessage()]


@pytest.mark.parametrize("lacks", ["nothing", "a file"])
def test_reports_and_metrics_however_a_load_ends(
    tmp_path: Path, lacks: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    folder = tmp_path / "m"
    write_checkpoint(CASES[0], folder)
    if lacks == "a file":
        (folder / "model-00002-of-00002.safetensors").unlink()
    options = {
        "metrics_file": str(tmp_path / "{model}-{rank}.prom"),
        "report_file": str(tmp_path / "report.json"),
        "report_dir": str(tmp_path / "reports"),
    }
    if lacks == "nothing":
        load(folder, extra=options)
    else:
        with pytest.raises(IncompleteCheckpointError):
            load(folder, extra=options)
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["ok"] == (lacks == "nothing")
    assert f"}} {float(document['ok'])}" in (tmp_path / "m-0.prom").read_text()
    if lacks == "a file":
        assert document["failure"]["phase"] == "headers"
        assert not (tmp_path / "reports").exists()
    else:
        assert len(list((tmp_path / "reports").iterdir())) == 1
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("s3stream: ")]
        assert len(lines) == 1


def test_lora_may_use_the_configuration_after_us() -> None:
    """``lora/lora.py`` makes a default loader of the same object."""
    from sglang.srt.configs.load_config import LoadConfig, LoadFormat
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    config = LoadConfig(load_format="s3stream", model_loader_extra_config={"concurrency": 3})
    loader = get_model_loader(config)
    assert loader._options.concurrency == 3
    assert config.load_format == LoadFormat.AUTO
    assert DefaultModelLoader(config)


@pytest.mark.parametrize("how", ["URL", "folder"])
def test_lora_adapters_may_be_urls(
    tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As ``lora/lora_manager.py`` and ``lora/lora.py`` read them. SGLang pins memory for them, which takes a GPU."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_config import LoRAConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("S3STREAM_CACHE_DIR", str(tmp_path / "cache"))
    folder = serving.make_adapter(tmp_path / "adapter", serving.make_llama(tmp_path / "m", seed=0))
    server.put_folder("adapters", "a/", folder)
    config = LoRAConfig("s3://adapters/a" if how == "URL" else str(folder), base_vocab_size=256)
    assert config.r == 8
    load_config = LoadConfig(load_format="s3stream")
    get_model_loader(load_config)
    with pretend(server_arguments(tmp_path / "m"), rank=0):
        source = DefaultModelLoader.Source(config.path, revision=None, fall_back_to_pt=True)
        found = dict(DefaultModelLoader(load_config)._get_weights_iterator(source))
    assert found
    assert not differences(safetensors.torch.load_file(folder / "adapter_model.safetensors"), found)
    with pytest.raises(ObjectNotFoundError, match="adapters/b"):
        LoRAConfig("s3://adapters/b")


def test_secondary_weights_prefixes_and_patterns_are_the_default_loaders(checkpoint: Get, tmp_path: Path) -> None:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    state = {name: torch.randn(4) for name in "abcdef"}
    files = {"m/model.safetensors": "ab", "m/vision/model.safetensors": "cd", "n/x.safetensors": "ef"}
    for file, names in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file({name: state[name] for name in names}, tmp_path / file)
    model_config = SimpleNamespace(model_path=str(tmp_path / "m"), revision=None, hf_config=None)
    source, patterns = DefaultModelLoader.Source, ["no/*", "vision/*.safetensors"]
    model = SimpleNamespace(
        secondary_weights=[
            source(str(tmp_path / "m"), None, "vision.", allow_patterns_overrides=patterns),
            source(str(tmp_path / "n"), None, "other.", fall_back_to_pt=False),
        ]
    )
    found: dict[str, torch.Tensor] = {}
    with pretend(server_arguments(checkpoint("llama")[1]), rank=0):  # the default loader asks for options
        expected = dict(get_model_loader(LoadConfig(load_format="safetensors"))._get_all_weights(model_config, model))
        loader = get_model_loader(LoadConfig(load_format="s3stream", model_loader_extra_config={"mode": "eager"}))
        taker = nn.Module()
        taker.load_weights = found.update  # type: ignore[assignment]
        loader.load_weights_and_postprocess(taker, loader._get_all_weights(model_config, model), torch.device("cpu"))
    assert set(found) == {"a", "b", "vision.c", "vision.d", "other.e", "other.f"}
    assert not differences(expected, found)


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLMNextN", "LlamaForCausalLM"])
@pytest.mark.parametrize("index", ["without it", "with it", "none"])
def test_an_mtp_file_that_the_index_forgot_is_read_as_sglang_reads_it(
    tmp_path: Path, architecture: str, index: str
) -> None:
    from sglang.srt.model_loader.weight_utils import filter_duplicate_safetensors_files, maybe_add_mtp_safetensors

    for name in ("model-1", "model-2", "mtp"):
        safetensors.torch.save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    if index != "none":
        indexed = ["model-1", "model-2"] + ["mtp"] * (index == "with it")
        document = {"weight_map": {name: f"{name}.safetensors" for name in indexed}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(document))
    hf_config = SimpleNamespace(architectures=[architecture], num_nextn_predict_layers=1)
    folder = str(tmp_path)
    every = [str(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    files = filter_duplicate_safetensors_files(every, folder, "model.safetensors.index.json")
    files = maybe_add_mtp_safetensors(files, folder, "model.safetensors.index.json", hf_config)
    config = StreamConfig()
    located = locate(folder, None, None, config, lambda *_: ("", []))
    with LoadSession(None, config) as session:
        part = session.open(located.source(config), only=files_to_load(located, None, hf_config))
        opened = {info.name for info in part.tensors}
    expected = {Path(file).stem for file in files}
    if index == "none" and architecture == "LlamaForCausalLM":
        expected.discard("mtp")  # of a folder without an index, only what is called model is loaded
    assert opened == expected


def test_the_layer_of_a_draft_model_is_chosen_as_sglang_chooses_it() -> None:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    names = ["model.embed.weight", *(f"model.mtp.layers.{n}.norm.weight" for n in (0, 1, 2, 11))]
    for number in (0, 1):
        expected = [name for name, _ in DefaultModelLoader._filter_mtp_weights([(n, None) for n in names], "", number)]
        layer = LayerOfSeveral(number)
        kept = [name for name in names if layer.keeps(None, SimpleNamespace(name=name))]  # type: ignore[arg-type]
        assert [layer.rename(name) for name in kept] == expected
