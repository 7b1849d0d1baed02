"""The bytes of CPU tensors as writable memory, for reads that put weights where they belong."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["byte_view", "bytes_of", "same_size_integer"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor.

    The view does not keep the tensor alive; whoever holds it must.

    Raises:
        ValueError: the tensor is elsewhere or has gaps.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"no contiguous CPU memory: {tensor.device}, strides {tensor.stride()}")
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def same_size_integer(itemsize: int) -> torch.dtype | None:
    """Return a dtype that copies elements of `itemsize` bytes without looking at them."""
    return _INTEGERS.get(itemsize)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Reinterpret elements as integers of the same size: packed and 8-bit floats have few kernels."""
    integer = same_size_integer(tensor.element_size())
    return tensor if integer is None else tensor.view(integer)
