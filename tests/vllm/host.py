"""Builds vLLM's models at any rank in this process, loads them, and compares what was loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.vllm.case import Case
from vllm_s3stream.parallel import pretend, set_layout

__all__ = ["Built", "build", "finalize", "load_default", "loading"]


@dataclass(frozen=True, slots=True)
class Built:
    """One rank's model before its weights are loaded, or after.

    Attributes:
        vllm_config: a ``vllm.config.VllmConfig``.
    """

    vllm_config: Any
    model: nn.Module
    tensor: int
    rank: int

    @property
    def model_config(self) -> Any:
        return self.vllm_config.model_config


def build(folder: Path, case: Case, *, tensor: int, rank: int, device: str = "cpu") -> Built:
    """Build one rank's model as ``BaseModelLoader.load_model`` does, with NaN wherever no value was written."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    vllm_config = _configure(folder, case, tensor, rank)
    model_config = vllm_config.model_config
    torch.manual_seed(0)  # a few layers draw their initial values
    with ExitStack() as stack:
        stack.enter_context(pretend(tensor=tensor, rank=rank))
        stack.enter_context(set_current_vllm_config(vllm_config))
        stack.enter_context(_default_dtype(model_config.dtype))
        stack.enter_context(torch.device(device))
        stack.enter_context(_memory_filled())
        model: nn.Module = initialize_model(vllm_config=vllm_config, model_config=model_config)
    return Built(vllm_config, model, tensor, rank)


@contextmanager
def loading(built: Built) -> Iterator[None]:
    """Be in the state in which ``BaseModelLoader.load_model`` calls a loader's ``load_weights``.

    That is without a default device: vLLM has left it when weights are loaded.
    """
    from vllm.config import set_current_vllm_config

    with (
        pretend(tensor=built.tensor, rank=built.rank),
        set_current_vllm_config(built.vllm_config),
        _default_dtype(built.model_config.dtype),
    ):
        yield


def load_default(built: Built) -> set[str] | None:
    """Load `built` from its folder with vLLM's own loader; return what the model says it loaded."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig(load_format="auto", use_tqdm_on_load=False))
    with loading(built), _result_of_load_weights(built.model) as results:
        loader.load_weights(built.model, built.model_config)
    finalize(built)
    return results[0]


def finalize(built: Built) -> None:
    """Quantise the layers that wait for the end of loading, as ``BaseModelLoader.load_model`` does.

    What follows there, ``process_weights_after_loading``, packs for one platform's kernels and depends on the loaded
    values alone.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing

    online = any(getattr(getattr(m, "quant_method", None), "uses_meta_device", False) for m in built.model.modules())
    if online:
        with loading(built):
            finalize_layerwise_processing(built.model, built.model_config)


def _configure(folder: Path, case: Case, tensor: int, rank: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, **case.engine}
    vllm_config = EngineArgs(
        model=str(folder), load_format="dummy", enforce_eager=True, skip_tokenizer_init=True, **arguments
    ).create_engine_config()
    set_layout(vllm_config, tensor=tensor, rank=rank, experts=case.experts)
    return vllm_config


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _memory_filled() -> Iterator[None]:
    """Let ``torch.empty`` fill memory (NaN, or the largest integer), which it does in deterministic mode only."""
    deterministic: Any = torch.utils.deterministic
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        deterministic.fill_uninitialized_memory = fill


@contextmanager
def _result_of_load_weights(model: nn.Module) -> Iterator[list[set[str] | None]]:
    """Keep what the model's ``load_weights`` returns, which vLLM's loader only checks and then drops."""
    method: Any = model.load_weights
    results: list[set[str] | None] = []

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        results.append(method(weights))
        return results[-1]

    vars(model)["load_weights"] = load_weights
    try:
        yield results
    finally:
        del vars(model)["load_weights"]
