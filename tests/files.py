"""Makes safetensors bytes by hand, so that what safetensors itself would refuse to write can be tested."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any


def raw_file(header: bytes | Mapping[str, Any], body: bytes = b"", *, length: int | None = None) -> bytes:
    """Return length, header and body as a file; `length` overrides the true header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
