"""What SGLang lets a plugin add: a load format's name, a step of resolving arguments, and a hook on a method.

SGLang logs what goes wrong while it applies hooks, and goes on (``plugins/hook_registry.py``); `check` finds out.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang_s3stream import LOAD_FORMAT
from sglang_s3stream.versions import installed_version
from streamer.errors import MissingDependencyError

__all__ = ["check", "install", "is_ours"]

_VERIFY = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
_EXPERTS = "sglang.srt.utils.common.has_fp8_weights_in_checkpoint"
_PROJECTION = "sglang.srt.arg_groups.model_hook._probe_wo_a_weight_dtype"
_ADAPTER = "sglang.srt.lora.lora_config.LoRAConfig.__init__"
_STEP = "handle_model_source_paths"


def is_ours(load_format: object) -> bool:
    """Whether `load_format`, as users write it, is this plugin's."""
    return isinstance(load_format, str) and load_format.lower() == LOAD_FORMAT


def install() -> bool:
    """Register everything, and return whether that was to be done.

    Raises:
        MissingDependencyError: this SGLang has no such ways of being extended.
    """
    try:
        from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        raise MissingDependencyError(
            f"SGLang {installed_version()} cannot be extended by s3stream: {error}",
            hint="use SGLang 0.5.23, which s3stream is tested with",
        ) from error
    if LOAD_FORMAT in LOAD_FORMAT_CHOICES:
        return False
    register_resolution_hook(_STEP)(_resolve_paths)
    for target, hook in _hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)
    add_load_format_choices([LOAD_FORMAT])  # last, for it tells that all is done
    return True


def check() -> None:
    """Make sure that SGLang applied our hooks.

    Raises:
        MissingDependencyError: it did not.
    """
    for target in _hooks():
        try:
            found = pkgutil.resolve_name(target)
        except (AttributeError, ImportError):
            found = None
        # What SGLang puts in a function's place keeps that function here (``hook_registry._wrap_fn``).
        if not hasattr(found, "__wrapped__"):
            raise MissingDependencyError(
                f"SGLang {installed_version()} did not apply s3stream's hook to {target}",
                hint="call sglang.srt.plugins.load_plugins() before arguments are resolved; its log says what failed",
            )


def _hooks() -> dict[str, Callable[..., Any]]:
    from sglang_s3stream.adapters import read_adapter
    from sglang_s3stream.folders import dtype_of_projection, has_float8_experts

    return {
        _VERIFY: _verify_load_format,
        _EXPERTS: has_float8_experts,
        _PROJECTION: dtype_of_projection,
        _ADAPTER: read_adapter,
    }


def _resolve_paths(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang_s3stream.urls import resolve_all

    resolve_all(server_args)
    previous(server_args)  # with folders in place of URLs, of which SGLang would choose another load format


def _verify_load_format(original: Callable[[Any], None], config: Any) -> None:
    if not is_ours(config.load_format):
        original(config)
        return
    from sglang_s3stream.loader import S3StreamLoader

    config.load_format = S3StreamLoader  # get_model_loader calls whatever class it finds here
