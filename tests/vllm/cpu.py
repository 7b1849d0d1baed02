"""Lets vLLM build, on any CPU, layers that it otherwise builds only where their kernels run.

Weights are loaded before kernels matter, so the kernels' requirements keep models from being tested for no reason
here. What loads weights is left as it is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

__all__ = ["allow_gated_layers"]


def allow_gated_layers() -> None:
    """Patch vLLM for the rest of this process; call it before the first model is built."""
    _stub_torchvision()
    _inspect_models_here()
    _claim_matrix_instructions()
    _compile_nothing()
    _quantise_in_torch()
    _keep_weights_unpacked()


def _stub_torchvision() -> None:
    """Image processors are imported along with models that see, and use torchvision when they process images."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Torchvision())


class _Torchvision(MetaPathFinder, Loader):
    """Makes any module of torchvision, with any attribute."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Anything(spec.name)
        module.__version__ = "0.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


class _Anything(ModuleType):
    __version__: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def _inspect_models_here() -> None:
    """vLLM asks a subprocess what a model class can do, to keep CUDA out of its own; that takes seconds per class."""
    from vllm.model_executor.models import registry

    def call(function: Callable[[], Any]) -> Any:
        return function()

    registry._run_in_subprocess = call


def _claim_matrix_instructions() -> None:
    """The CPU kernels for float8, four-bit and MXFP4 layers want AMX, and look for it when a layer is built."""
    from vllm import _custom_ops as ops

    torch.cpu._is_amx_tile_supported = lambda: True
    ops._supports_cpu_fp8_w8a16 = True


def _compile_nothing() -> None:
    """Block quantisation and some rotary embeddings are compiled, which needs a compiler and takes ten seconds each."""
    torch.compiler.set_stance("force_eager")


def _quantise_in_torch() -> None:
    """The operator that online quantisation calls while weights are loaded has no CPU build."""
    from vllm import _custom_ops as ops

    def scaled_fp8_quant(
        input: torch.Tensor,
        scale: torch.Tensor | None = None,
        num_token_padding: int | None = None,
        scale_ub: torch.Tensor | None = None,
        use_per_token_if_dynamic: bool = False,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        limits = torch.finfo(torch.float8_e4m3fn)
        values = input.float()
        if scale is None:
            largest = values.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else values.abs().amax()
            scale = largest.reshape(-1, 1) / limits.max if use_per_token_if_dynamic else largest.reshape(1) / limits.max
        divisor = scale[:, None] if scale.ndim == 1 and scale.numel() > 1 else scale
        return (values / divisor).clamp(limits.min, limits.max).to(torch.float8_e4m3fn), scale

    ops.scaled_fp8_quant = scaled_fp8_quant


def _keep_weights_unpacked() -> None:
    """Online quantisation packs each layer for its kernel as soon as it is loaded, with operators that need AMX."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.utils import replace_parameter

    def leave(self: object, layer: torch.nn.Module) -> None:
        """Leave the weights as they were quantised."""

    def keep(
        self: object,
        layer: Any,
        w13: torch.Tensor,
        w2: torch.Tensor,
        w13_scale: torch.Tensor,
        w2_scale: torch.Tensor,
        *_: object,
        **__: object,
    ) -> None:
        """Put the quantised experts where their kernel would have put them packed."""
        for name, value in {"w13_weight": w13, "w2_weight": w2}.items():
            replace_parameter(layer, name, value)
        layer.scales_for_comparison = [w13_scale, w2_scale]

    for kernel in _classes(cpu):
        if "process_weights_after_loading" in vars(kernel):
            kernel.process_weights_after_loading = leave
    for method in _classes(fp8):
        if "_setup_kernel" in vars(method):
            method._setup_kernel = keep


def _classes(module: ModuleType) -> list[Any]:
    return [cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__]
