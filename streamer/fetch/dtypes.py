"""Torch dtypes and shapes of safetensors entries."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping

import torch

from streamer.checkpoint.checkpoint import TensorInfo
from streamer.errors import UnsupportedCheckpointError

__all__ = ["check_byte_order", "torch_dtype", "torch_shape"]

_ATTRIBUTES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


@functools.cache
def _known() -> Mapping[str, torch.dtype]:
    return {name: getattr(torch, spelled) for name, spelled in _ATTRIBUTES.items() if hasattr(torch, spelled)}


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """Return the dtype of `info`.

    Raises:
        UnsupportedCheckpointError: torch has none, such as for F6, or this version has none yet.
    """
    dtype = _known().get(info.dtype)
    if dtype is None:
        raise UnsupportedCheckpointError(
            f"tensor {info.name!r} has dtype {info.dtype}, which torch {torch.__version__} cannot hold"
        )
    return dtype


def torch_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of `info` as torch counts it: packed F4 has two elements in one.

    Raises:
        UnsupportedCheckpointError: packed elements would straddle rows.
    """
    if info.dtype != "F4":
        return info.shape
    if not info.shape or info.shape[-1] % 2:
        raise UnsupportedCheckpointError(
            f"tensor {info.name!r} packs two F4 elements in a byte, but its shape {list(info.shape)} "
            "has an odd last dimension"
        )
    return (*info.shape[:-1], info.shape[-1] // 2)


def check_byte_order() -> None:
    """safetensors data is little-endian, and received in place without looking at it.

    Raises:
        UnsupportedCheckpointError: this machine is big-endian.
    """
    if sys.byteorder != "little":
        raise UnsupportedCheckpointError("safetensors are little-endian; big-endian machines are not supported")
