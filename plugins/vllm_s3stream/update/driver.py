"""Updates asked for by the program that has the engine: ``vllm.LLM`` or ``AsyncLLM``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamer import errors
from streamer.errors import ConfigError, LoadError, RollbackError, StreamError

__all__ = ["Updated", "update_weights", "update_weights_async"]

_METHOD = "s3stream_update"
_NO_EXTENSION = "start the engine with worker_extension_cls='vllm_s3stream.update.Updates'"


@dataclass(frozen=True, slots=True)
class Updated:
    """What an engine serves after an update.

    Attributes:
        ranks: how many have it.
        seconds: that the slowest took.
        nbytes: received by all together.
    """

    url: str
    version: str
    ranks: int
    seconds: float
    nbytes: int


def update_weights(llm: Any, url: str, version: str | None = None) -> Updated:
    """Replace the weights of a ``vllm.LLM`` by those at `url`, on all ranks or none.

    Args:
        version: what to call them; the URL if None.

    Raises:
        StreamError: of the rank that failed first; the engine serves what it served before.
        RollbackError: it has nothing to serve any more.
    """
    engine = llm.llm_engine
    _require_able(engine.vllm_config)
    if engine.has_unfinished_requests():
        raise ConfigError("the engine has unfinished requests", hint="update between calls of generate()")
    # Nothing runs until the call returns, so what is dropped now is not made again of the old weights.
    if not llm.reset_prefix_cache(reset_connector=_has_connector(engine.vllm_config)):
        raise LoadError("no update, for the prefix cache could not be reset", hint="see vLLM's log for who holds it")
    if hasattr(engine, "reset_encoder_cache"):
        engine.reset_encoder_cache()
    updated = _agree(url, llm.collective_rpc(_METHOD, args=(url, version)))
    if hasattr(engine, "set_weight_version"):
        engine.set_weight_version(updated.version)
    return updated


async def update_weights_async(engine: Any, url: str, version: str | None = None, *, mode: str = "wait") -> Updated:
    """Replace the weights of an ``AsyncLLM`` by those at `url`; requests that come meanwhile wait.

    Args:
        version: what to call them; the URL if None.
        mode: ``wait`` for requests that run, or ``abort`` them.

    Raises:
        ConfigError: another mode: requests that are kept would go on from what the old weights made of them.
        StreamError, RollbackError: see `update_weights`.
    """
    _require_able(engine.vllm_config)
    if mode not in ("wait", "abort"):
        raise ConfigError(f"mode must be wait or abort, not {mode!r}")
    await engine.pause_generation(mode=mode, clear_cache=True)
    try:
        if not await engine.reset_prefix_cache(reset_connector=_has_connector(engine.vllm_config)):
            raise LoadError(
                "no update, for the prefix cache could not be reset", hint="see vLLM's log for who holds it"
            )
        if hasattr(engine, "reset_encoder_cache"):
            await engine.reset_encoder_cache()
        updated = _agree(url, await engine.collective_rpc(_METHOD, args=(url, version)))
        if hasattr(engine, "update_weight_version"):
            await engine.update_weight_version(updated.version)
    except RollbackError:
        raise  # nothing must run: the engine is ending
    except BaseException:
        await engine.resume_generation()
        raise
    await engine.resume_generation()
    return updated


def _require_able(vllm_config: Any) -> None:
    if vllm_config.parallel_config.data_parallel_size > 1:
        raise ConfigError(
            "of several data parallel replicas, vLLM hands on the answer of the first only",
            hint="update engines without --data-parallel-size, one after the other",
        )
    if not vllm_config.parallel_config.worker_extension_cls:
        raise ConfigError("the engine's workers cannot update their weights", hint=_NO_EXTENSION)


def _has_connector(vllm_config: Any) -> bool:
    return getattr(vllm_config, "kv_transfer_config", None) is not None


def _agree(url: str, answers: Sequence[Mapping[str, Any]]) -> Updated:
    """See that all ranks say the same.

    Raises:
        StreamError: of the kind that a rank names, the gravest first.
    """
    failed = sorted((answer for answer in answers if not answer["updated"]), key=lambda answer: not answer["lost"])
    if failed:
        first = failed[0]
        kind = getattr(errors, str(first["error_type"]), LoadError)
        raise _made(kind, str(first["error"]))
    versions = {(answer["url"], answer["version"]) for answer in answers}
    if len(versions) != 1:
        raise RollbackError(f"after the update to {url}, ranks have different weights: {sorted(versions)}")
    return Updated(
        str(answers[0]["url"]),
        str(answers[0]["version"]),
        len(answers),
        max(float(answer["seconds"]) for answer in answers),
        sum(int(answer["bytes"]) for answer in answers),
    )


def _made(kind: Any, message: str) -> StreamError:
    known = isinstance(kind, type) and issubclass(kind, StreamError)
    error: StreamError = kind(message) if known else LoadError(message)
    return error
