"""Turns URLs among the engine's arguments into folders on this machine, before vLLM looks at them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from streamer.artifacts.locate import is_url
from streamer.artifacts.metadata import pull
from streamer.config import StreamConfig
from streamer.errors import ConfigError
from vllm_s3stream import LOAD_FORMAT
from vllm_s3stream.options import PluginOptions

__all__ = ["configuring", "resolve_all"]

logger = logging.getLogger("vllm.s3stream")

#: The options of the engine that is being configured, for what vLLM asks meanwhile.
configuring: ContextVar[PluginOptions | None] = ContextVar("configuring", default=None)


def _options_of(arguments: Any) -> PluginOptions | None:
    """Return our options, or None when these ``EngineArgs`` are for another load format."""
    if str(getattr(arguments, "load_format", "")).lower() != LOAD_FORMAT:
        return None
    return PluginOptions.parse(getattr(arguments, "model_loader_extra_config", None) or {})


def _resolve(url: str, revision: str | None, config: StreamConfig) -> str:
    """Return a folder with everything of `url` but the weights; the loader finds those from there.

    Args:
        revision: a folder below `url`, as in stores that keep several versions of a model side by side.
            S3 has versions of objects, not of prefixes, so none of its version ids could name a model's.
    """
    if revision:
        url = f"{url.rstrip('/')}/{revision.strip('/')}"
    return str(pull(url, config).folder)


@contextlib.contextmanager
def resolve_all(arguments: Any) -> Iterator[None]:
    """Replace the URLs in ``EngineArgs`` by folders; the context lasts while they are made into a configuration.

    Raises:
        ConfigError: a scheme that is not supported, or a malformed URL.
        CheckpointError, SourceError: see `streamer.errors`.
    """
    options = _options_of(arguments)
    if options is None:
        yield
        return
    config = options.stream
    model, revision = arguments.model, arguments.revision
    if is_url(model):
        if arguments.served_model_name is None:
            arguments.served_model_name = model
        arguments.model = _resolve(model, revision, config)
        arguments.revision = None
        logger.info("s3stream: %s is served from %s", model, arguments.model)
    if is_url(arguments.tokenizer):
        same = arguments.tokenizer == model and not arguments.tokenizer_revision
        arguments.tokenizer = (
            arguments.model if same else _resolve(arguments.tokenizer, arguments.tokenizer_revision, config)
        )
        arguments.tokenizer_revision = None
    if is_url(arguments.hf_config_path):
        arguments.hf_config_path = _resolve(arguments.hf_config_path, revision, config)
    _resolve_draft(arguments, config)
    token = configuring.set(options)
    try:
        yield
    finally:
        configuring.reset(token)


def _resolve_draft(arguments: Any, config: StreamConfig) -> None:
    if is_url(getattr(arguments, "spec_model", None)):  # since 0.30
        arguments.spec_model = _resolve(arguments.spec_model, None, config)
    speculative = arguments.speculative_config
    if speculative is None:
        return
    if not isinstance(speculative, dict):
        raise ConfigError(f"speculative_config must be a mapping, not {type(speculative).__name__}")
    changes: dict[str, Any] = {}
    if is_url(speculative.get("model")):
        changes = {"model": _resolve(speculative["model"], speculative.get("revision"), config), "revision": None}
    if is_url(speculative.get("tokenizer")):
        changes["tokenizer"] = _resolve(speculative["tokenizer"], None, config)
    if changes:
        arguments.speculative_config = {**speculative, **changes}
