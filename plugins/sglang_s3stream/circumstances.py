"""What SGLang's loading code may go by, beside the model and the checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from streamer.plan_cache.cache import Circumstances

__all__ = ["circumstances_of_sglang"]

_PARALLEL = ("tp", "pp", "dp", "attn_tp", "attn_dp", "attn_cp", "dcp", "moe_tp", "moe_ep", "moe_dp")
#: Settings that differ between starts that are the same otherwise, or are secret.
_PASSING = ("random_seed", "host", "_port", "_ports", "_addr", "api_key", "password")


def circumstances_of_sglang() -> Circumstances:
    """Return them for the engine that is being started in this process."""
    return Circumstances(dict(_facts()), _is_opaque)


def _facts() -> Iterator[tuple[str, str]]:
    import sglang
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.runtime_context import get_parallel, get_server_args

    yield "engine", f"sglang {sglang.__version__}"
    parallel = get_parallel()
    for name in _PARALLEL:
        for what in (f"{name}_rank", f"{name}_size"):
            with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # not known in this layout
                yield what, str(getattr(parallel, what))
    placed = get_global_expert_location_metadata()  # perhaps as a file says
    yield "experts", "" if placed is None else str(placed.physical_to_logical_map_cpu.tolist())
    arguments = get_server_args()
    for name in type(arguments).__struct_fields__:
        if name != "port" and not name.endswith(_PASSING):
            yield f"--{name}", str(getattr(arguments, name))
    for name, value in os.environ.items():
        if name.startswith("SGLANG_") and name != "SGLANG_RUN_ID":
            yield name, value


def _is_opaque(kind: type) -> bool:
    """Whether objects of a class hold settings that the facts tell, or addresses that change with every start."""
    return kind.__module__.startswith(
        ("torch.", "sglang.srt.distributed.", "sglang.srt.server_args", "sglang.srt.runtime_context")
    )
