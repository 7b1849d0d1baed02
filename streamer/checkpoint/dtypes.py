"""The element types of safetensors 0.8, by their names in headers, with their sizes in bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["DTYPE_BITS"]

#: Bits per element, as in the ``Dtype`` enum of safetensors' ``tensor.rs``. F4 and F6 are packed.
DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
