"""Lets vLLM build layers whose kernels this machine cannot run, for plans, which run none.

A quantised layer looks for its kernel when it is built, and the CPU's kernels for float8 and four-bit
weights want AMX (``vllm/model_executor/kernels/linear``). Parameters, and how they are loaded, are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["kernels_not_needed"]


@contextlib.contextmanager
def kernels_not_needed() -> Iterator[None]:
    """Claim, while the context lasts, instructions that a CPU may lack. Without effect on other platforms."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    claims: list[tuple[Any, str, Any]] = []
    if current_platform.is_cpu():
        claims = [
            (torch.cpu, "_is_amx_tile_supported", lambda: True),
            (_custom_ops, "_supports_cpu_fp8_w8a16", True),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in claims:
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield
