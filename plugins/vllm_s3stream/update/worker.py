"""What a worker of vLLM does when it is asked for an update, and what becomes of it if there is no way back."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from streamer.errors import LoadError, RollbackError, StreamError
from streamer.share.group import Group, ProcessGroup
from vllm_s3stream.update.gates import refuse_asleep, refuse_engine, refuse_replicas, refuse_transfer
from vllm_s3stream.update.record import record_of

__all__ = ["update", "version"]

logger = logging.getLogger("vllm.s3stream")

#: How a worker runs a model; none of these may be called when its weights are a mixture.
_RUNNING = ("execute_model", "sample_tokens", "execute_dummy_batch")
#: Names of the processes that vLLM starts for workers, alone or with the engine's core.
_OF_VLLM = ("VllmWorker", "EngineCore")
_ANSWER_SECONDS = 5.0


def update(worker: Any, url: str, version: str | None) -> dict[str, Any]:
    """Do this rank's part; see `Updates.s3stream_update`."""
    from vllm_s3stream.update.transaction import Transaction, as_loading

    began = time.monotonic()
    transaction: Transaction | None = None
    failed: StreamError | None = None
    try:
        options = refuse_engine(worker.vllm_config)
        refuse_replicas()
        refuse_asleep()
        refuse_transfer(worker)
        if worker.vllm_config.speculative_config is not None:
            logger.warning("s3stream: the draft model keeps its weights; it may guess less well")
        with as_loading(worker.vllm_config):
            transaction = Transaction(
                _model_of(worker),
                worker.vllm_config,
                options,
                _all_ranks(),
                forget=lambda: _forget_what_was_derived(worker),
            )
            transaction.run(str(url), None if version is None else str(version))
    except StreamError as error:
        failed = error
    except Exception as error:
        logger.exception("s3stream: the update failed")
        failed = LoadError(f"{type(error).__name__}: {error}", hint="see the log of this rank")
    if isinstance(failed, RollbackError):
        _stop(worker, failed)
    answer = {
        **_now(worker),
        "updated": failed is None,
        "seconds": round(time.monotonic() - began, 3),
        "bytes": transaction.fetched_bytes if transaction is not None else 0,
        "lost": isinstance(failed, RollbackError),
    }
    return {**answer, **_error(failed)}


def version(worker: Any) -> dict[str, Any]:
    """See `Updates.s3stream_version`."""
    return _now(worker)


def _now(worker: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"rank": int(worker.rank), "url": None, "version": None, **_error(None)}
    try:
        revision = record_of(_model_of(worker)).revision
    except StreamError as error:
        return {**answer, **_error(error)}
    return {**answer, "url": revision.url, "version": revision.version}


def _error(error: StreamError | None) -> dict[str, Any]:
    return {
        "error": None if error is None else str(error),
        "error_type": None if error is None else type(error).__name__,
    }


def _model_of(worker: Any) -> nn.Module:
    model: nn.Module = worker.model_runner.get_model()
    return model


def _all_ranks() -> Group | None:
    """Return the group of all ranks of the engine: other pipeline stages have to agree too."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_world_group().cpu_group
    return ProcessGroup(group) if isinstance(group, dist.ProcessGroup) else None


def _forget_what_was_derived(worker: Any) -> None:
    """Reset what the worker computed with the old weights, as vLLM's ``reload_weights`` does."""
    for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
        reset = getattr(worker.model_runner, name, None)
        if callable(reset):
            reset()


def _stop(worker: Any, error: RollbackError) -> None:
    """Let no batch run any more.

    An exception from a batch ends the engine, with its message; one from ``collective_rpc`` would not. Processes that
    vLLM started are ended without waiting for a batch, once the answer is out, so that the engine is seen to be dead.
    """
    logger.critical("s3stream: %s", error)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise error

    for name in _RUNNING:
        if hasattr(worker, name):
            setattr(worker, name, refuse)
    if multiprocessing.current_process().name.startswith(_OF_VLLM):
        timer = threading.Timer(_ANSWER_SECONDS, _end)
        timer.daemon = True
        timer.start()


def _end() -> None:
    with contextlib.suppress(Exception):
        logger.critical("s3stream: this process ends, for its weights are a mixture")
    os._exit(1)
