"""Turns URLs among the server's arguments into folders on this machine, before SGLang looks at them.

SGLang knows object stores only through one package: for ``s3://``, ``gs://`` and ``az://`` it calls that package for
the configuration, and then chooses that package's load format, whatever the user chose
(``arg_groups/model_path_hook.py``). A folder is left alone, and the loader finds in it where the weights are.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from sglang_s3stream.folders import configuring
from sglang_s3stream.hooks import check, is_ours
from streamer.artifacts.locate import is_url
from streamer.artifacts.metadata import pull
from streamer.config import StreamConfig
from streamer.errors import ConfigError
from streamer.recording import model_name

__all__ = ["options_of", "resolve_all"]

logger = logging.getLogger("sglang.s3stream")

#: Arguments that load weights in ways that never ask the plugin, and the values with which they do not.
_UNSUPPORTED = {
    "use_ray": (False, "Ray's actors do not load SGLang's plugins"),
    "weight_cache_mode": ("off", "the weight cache's daemon does not load SGLang's plugins"),
    "startup_weight_load_mode": ("serial", "overlap reads local files by itself"),
    "enable_elastic_expert_backup": (False, "the backup's processes do not load SGLang's plugins"),
    "model_checksum": (None, "SGLang checks local files; use integrity=manifest or integrity=checksums"),
    "modelopt_quant": (None, "ModelOpt's quantisation loads the model through Transformers"),
}


def options_of(extra: Any) -> StreamConfig:
    """Return the options in ``--model-loader-extra-config``, JSON or what that says.

    Raises:
        ConfigError: it is no JSON object, or has an unknown key or a wrong value.
    """
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError as error:
            raise ConfigError(f"model_loader_extra_config is no JSON: {error}") from error
    if extra is not None and not isinstance(extra, dict):
        raise ConfigError(f"model_loader_extra_config must be a mapping, not {type(extra).__name__}")
    return StreamConfig.resolve(extra or {})


def resolve_all(server_args: Any) -> None:
    """Replace the URLs that s3stream is to load from by folders, declared as SGLang's own steps declare theirs.

    Raises:
        ConfigError: an option is wrong, or does not go with this load format; or a scheme that is not supported.
        CheckpointError, SourceError: see `streamer.errors`.
        MissingDependencyError: SGLang did not apply our hooks.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    cfg = resolving_view(server_args)
    draft_format = cfg.speculative_draft_load_format
    ours, draft_ours = is_ours(cfg.load_format), is_ours(draft_format if draft_format is not None else cfg.load_format)
    if not ours and not draft_ours:
        return
    check()
    _refuse_unsupported(cfg)
    config = options_of(cfg.model_loader_extra_config)
    configuring.set(config)
    changes: dict[str, Any] = {}
    if ours:
        changes.update(_resolve_model(cfg, config))
    if draft_ours and is_url(cfg.speculative_draft_model_path):
        changes["speculative_draft_model_path"] = _resolve(
            cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision, config
        )
        changes["speculative_draft_model_revision"] = None
    if changes:
        declare_resolution(server_args, "s3stream", **changes)


def _resolve_model(cfg: Any, config: StreamConfig) -> dict[str, Any]:
    from sglang.srt.utils.runai_utils import is_runai_obj_uri

    changes: dict[str, Any] = {}
    if is_url(cfg.model_path):
        folder = _resolve(cfg.model_path, cfg.revision, config)
        changes.update(model_path=folder, revision=None)
        if cfg.served_model_name is None:
            # A colon stands for an adapter's name elsewhere (``arg_groups/validation_hook.py``).
            known = is_runai_obj_uri(cfg.model_path)
            changes["served_model_name"] = cfg.model_path if known else model_name(cfg.model_path)
        logger.info("s3stream: %s is served from %s", cfg.model_path, folder)
    if is_url(cfg.tokenizer_path):
        same = cfg.tokenizer_path == cfg.model_path
        changes["tokenizer_path"] = changes["model_path"] if same else _resolve(cfg.tokenizer_path, None, config)
    return changes


def _resolve(url: str, revision: str | None, config: StreamConfig) -> str:
    """Return a folder with everything of `url` but the weights; the loader finds those from there.

    Args:
        revision: a folder below `url`, as in stores that keep several versions of a model side by side.
    """
    if revision:
        url = f"{url.rstrip('/')}/{revision.strip('/')}"
    return str(pull(url, config).folder)


def _refuse_unsupported(cfg: Any) -> None:
    for name, (neutral, why) in _UNSUPPORTED.items():
        value = getattr(cfg, name, neutral)
        if value != neutral:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"--load-format s3stream does not go with {option} ({value}): {why}",
                hint=f"leave out {option}, or use another load format",
            )
    if cfg.pp_size > 1 and cfg.speculative_algorithm is not None:
        raise ConfigError(
            f"--load-format s3stream does not go with --pp-size {cfg.pp_size} and --speculative-algorithm: SGLang then "
            "reads the embeddings from local files again",
            hint="leave out one of them, or use another load format",
        )
