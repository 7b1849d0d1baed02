"""How SGLang gets to know the load format, in fresh processes as its own are, and what becomes of URLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from streamer.artifacts.metadata import pull, read_pins
from streamer.config import StreamConfig
from streamer.errors import ConfigError, MissingDependencyError
from tests.servers.object_server import ObjectServer
from tests.sglang.cases import CASES, write_checkpoint
from tests.sglang.host import server_arguments

_SITE = Path(__file__).parent / "site"


def in_fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with the stubs, and with nothing of SGLang imported yet."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_SITE), os.environ.get("PYTHONPATH", "")]),
        "SGLANG_STUBS": "torchvision,vllm,IPython",
        **environment,
    }
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    write_checkpoint(CASES[0], folder)
    return folder


@pytest.fixture
def store(server: ObjectServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """A store with the model under several names."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for prefix in ("org/m", "org/m/v2", "org/draft", "org/tokenizer"):
        for path in folder.iterdir():
            server.put("models", f"{prefix}/{path.name}", path.read_bytes())
    return server


@pytest.fixture
def context() -> Iterator[None]:
    from sglang.srt.runtime_context import reset_context

    reset_context()
    yield
    reset_context()


def resolved(model: str | Path, **arguments: Any) -> Any:
    """Return the arguments as SGLang sees them after it has resolved them."""
    from sglang.srt.arg_groups.overrides import resolving_view

    made = server_arguments(model, **{"load_format": "s3stream", **arguments})
    made.resolve_once()
    return resolving_view(made)


def test_the_plugin_is_an_entry_point() -> None:
    (entry,) = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "s3stream"]
    assert entry.value == "sglang_s3stream:register"


def test_importing_the_plugin_imports_neither_sglang_nor_torch() -> None:
    done = in_fresh_process("import sys, sglang_s3stream; print('torch' in sys.modules, 'sglang' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_fresh_process_gets_the_load_format(folder: Path) -> None:
    """The command line takes it, and the process that loads makes our loader of it, as often as plugins are loaded."""
    done = in_fresh_process(
        "import json, sys\n"
        "from sglang.srt.plugins import load_plugins\n"
        "import sglang_s3stream\n"
        "load_plugins(); load_plugins(); sglang_s3stream.register()\n"
        "from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES\n"
        "from sglang.srt.arg_groups import resolution_hooks\n"
        "from sglang.srt.configs.load_config import LoadConfig\n"
        "from sglang.srt.model_loader.loader import get_model_loader\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        f"prepare_server_args(['--model-path', {str(folder)!r}, '--load-format', 's3stream', '--device', 'cpu'])\n"
        "loaders = [get_model_loader(LoadConfig(load_format=name)) for name in ('S3Stream', 'auto')]\n"
        "steps = {name: len(hooks) for name, hooks in resolution_hooks._HOOKS.items()}\n"
        "names = [type(loader).__name__ for loader in loaders]\n"
        "print(json.dumps([names, LOAD_FORMAT_CHOICES.count('s3stream'), steps]))\n"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names, choices, steps = json.loads(done.stdout.splitlines()[-1])
    assert names == ["S3StreamLoader", "DefaultModelLoader"]
    assert choices == 1
    assert steps == {"handle_model_source_paths": 1}


def test_a_list_of_plugins_without_ours_leaves_sglang_alone() -> None:
    done = in_fresh_process(
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "prepare_server_args(['--model-path', 'x', '--load-format', 's3stream'])\n",
        SGLANG_PLUGINS="another",
    )
    assert done.returncode != 0
    assert "invalid choice: 's3stream'" in done.stderr


def test_hooks_that_were_not_applied_are_told(store: ObjectServer) -> None:
    """As when a program calls our `register` and not SGLang's ``load_plugins``, or SGLang's method is another."""
    done = in_fresh_process(
        "import sglang_s3stream; sglang_s3stream.register()\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "ServerArgs(model_path='s3://models/org/m', load_format='s3stream', device='cpu').resolve_once()\n"
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("streamer.errors.MissingDependencyError: SGLang 0.5.23 did not apply s3stream's hook to")
    assert not store.counters.requests


@pytest.mark.usefixtures("registered", "context")
class TestUrls:
    def test_a_model_becomes_a_folder_and_keeps_its_name(self, store: ObjectServer) -> None:
        cfg = resolved("s3://models/org/m")
        pulled = read_pins(cfg.model_path)
        assert pulled is not None
        assert pulled.url.rstrip("/") == "s3://models/org/m"
        assert cfg.load_format == "s3stream"
        assert cfg.served_model_name == "s3://models/org/m"
        assert cfg.tokenizer_path == cfg.model_path
        assert (Path(cfg.model_path) / "config.json").is_file()
        assert not list(Path(cfg.model_path).glob("*.safetensors"))

    def test_a_revision_is_a_folder_below(self, store: ObjectServer) -> None:
        cfg = resolved("s3://models/org/m", revision="v2")
        pulled = read_pins(cfg.model_path)
        assert pulled is not None
        assert pulled.url.rstrip("/") == "s3://models/org/m/v2"
        assert cfg.revision is None

    def test_a_tokenizer_of_its_own(self, store: ObjectServer, folder: Path) -> None:
        cfg = resolved(folder, tokenizer_path="s3://models/org/tokenizer")
        pulled = read_pins(cfg.tokenizer_path)
        assert pulled is not None
        assert pulled.url.rstrip("/") == "s3://models/org/tokenizer"
        assert cfg.model_path == str(folder)

    def test_a_scheme_that_sglang_does_not_know(self, folder: Path) -> None:
        cfg = resolved(f"local://{folder}")
        pulled = read_pins(cfg.model_path)
        assert pulled is not None
        assert cfg.load_format == "s3stream"
        assert cfg.served_model_name == folder.name

    def test_a_draft_model(self, store: ObjectServer, folder: Path) -> None:
        """The pipeline would look for a GPU to speculate with; our step is what is tested."""
        from sglang.srt.arg_groups.overrides import resolving_view

        from sglang_s3stream.urls import resolve_all

        for formats in ({"load_format": "s3stream"}, {"speculative_draft_load_format": "s3stream"}):
            arguments = server_arguments(folder, speculative_draft_model_path="s3://models/org/draft", **formats)
            resolve_all(arguments)
            pulled = read_pins(resolving_view(arguments).speculative_draft_model_path)
            assert pulled is not None
            assert pulled.url.rstrip("/") == "s3://models/org/draft"

    def test_other_load_formats_keep_their_urls(self, store: ObjectServer) -> None:
        """SGLang then asks the package that it knows object stores by, which is not installed here."""
        with pytest.raises(ModuleNotFoundError, match="runai_model_streamer"):
            resolved("s3://models/org/m", load_format="auto")
        assert not store.counters.requests

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("use_ray", True),
            ("weight_cache_mode", "client"),
            ("startup_weight_load_mode", "overlap"),
            ("model_checksum", "sums.json"),
            ("enable_elastic_expert_backup", True),
            ("modelopt_quant", "fp8"),
        ],
    )
    def test_what_cannot_work_is_refused_at_once(self, store: ObjectServer, name: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"does not go with --{name.replace('_', '-')}"):
            resolved("s3://models/org/m", **{name: value})
        assert not store.counters.requests

    def test_speculation_over_stages_is_refused(self, store: ObjectServer) -> None:
        with pytest.raises(ConfigError, match="does not go with --pp-size 2 and --speculative-algorithm"):
            resolved("s3://models/org/m", pp_size=2, speculative_algorithm="EAGLE")
        assert not store.counters.requests

    @pytest.mark.parametrize(
        ("extra", "message"),
        [("{", "no JSON"), ("[1]", "must be a mapping"), ('{"concurency": 3}', "concurrency")],
    )
    def test_wrong_options(self, store: ObjectServer, extra: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            resolved("s3://models/org/m", model_loader_extra_config=extra)
        assert not store.counters.requests

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, None])
    def test_dtypes_that_sglang_looks_for_are_read_from_the_store(
        self, server: ObjectServer, store: ObjectServer, tmp_path: Path, dtype: torch.dtype | None
    ) -> None:
        """Of a folder without weights SGLang would say that there are none, and quantise otherwise."""
        from sglang.srt.arg_groups import model_hook
        from sglang.srt.utils import common

        tensors = {"model.norm.weight": torch.zeros(2, dtype=torch.bfloat16)}
        if dtype is not None:
            tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(2).to(dtype)
            tensors["model.layers.0.self_attn.wo_a.weight"] = torch.zeros(2).to(dtype)
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / "config.json").write_text("{}")
        server.put_folder("models", "org/asked/", tmp_path)
        pulled = pull("s3://models/org/asked", StreamConfig()).folder
        answers = [
            (
                common.has_fp8_weights_in_checkpoint(str(folder)),
                model_hook._probe_wo_a_weight_dtype(SimpleNamespace(model_path=str(folder), revision=None), None),
            )
            for folder in (tmp_path, pulled)
        ]
        names = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", None: None}
        assert answers == [(dtype == torch.float8_e4m3fn, names[dtype])] * 2

    def test_a_hook_that_another_plugin_replaced_is_told(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.configs.load_config import LoadConfig

        original = LoadConfig._verify_load_format.__wrapped__
        monkeypatch.setattr(LoadConfig, "_verify_load_format", original)
        with pytest.raises(MissingDependencyError, match="did not apply"):
            resolved(folder)
