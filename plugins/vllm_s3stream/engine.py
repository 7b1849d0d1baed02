"""vLLM's models for ``s3stream plan --engine vllm``: any rank of any layout, in one process, without memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from streamer.engines import MetaParameters, ParallelLayout, RankModel
from streamer.errors import CheckpointError, ConfigError, UnsupportedCheckpointError
from vllm_s3stream.gates import kernels_not_needed
from vllm_s3stream.parallel import pretend, set_layout

__all__ = ["VllmEngine"]


class VllmEngine:
    """The `streamer.engines.Engine` of vLLM. Needs neither a GPU nor other processes.

    Raises:
        ImportError: vLLM is not installed.
    """

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the command line has output of its own
        import vllm.engine.arg_utils  # noqa: F401

    def build(self, folder: Path, layout: ParallelLayout, rank: int) -> RankModel:
        if not (folder / "config.json").is_file() and not (folder / "params.json").is_file():
            raise CheckpointError(
                f"{folder} has no config.json, which says what model this is", hint="put it beside the weights"
            )
        from vllm.model_executor.model_loader.utils import initialize_model

        vllm_config = _configure(folder, layout, rank)
        with _as_rank(vllm_config, layout, rank), kernels_not_needed(), MetaParameters():
            model = initialize_model(vllm_config=vllm_config, model_config=vllm_config.model_config)

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            with _as_rank(vllm_config, layout, rank):
                return model.load_weights(weights)

        return RankModel(model, load_weights)


def _configure(folder: Path, layout: ParallelLayout, rank: int) -> Any:
    from pydantic import ValidationError
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(folder), load_format="dummy", enforce_eager=True, skip_tokenizer_init=True, trust_remote_code=False
    )
    try:
        vllm_config = arguments.create_engine_config()
        set_layout(vllm_config, tensor=layout.tensor, pipeline=layout.pipeline, rank=rank, experts=layout.experts)
    except ValidationError as error:
        raise UnsupportedCheckpointError(f"vLLM does not take {folder}: {error.errors()[0]['msg']}") from error
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"vLLM cannot spread this model like that: {error}") from error
    return vllm_config


@contextmanager
def _as_rank(vllm_config: Any, layout: ParallelLayout, rank: int) -> Iterator[None]:
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    with ExitStack() as stack:
        stack.enter_context(pretend(tensor=layout.tensor, pipeline=layout.pipeline, rank=rank))
        stack.enter_context(set_current_vllm_config(vllm_config))
        stack.enter_context(set_default_torch_dtype(vllm_config.model_config.dtype))
        stack.enter_context(torch.device("cpu"))
        yield
