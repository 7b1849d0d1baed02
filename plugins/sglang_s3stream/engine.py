"""SGLang's models for ``s3stream plan --engine sglang``: any rank of any layout, in one process, without memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from sglang_s3stream.parallel import pretend
from streamer.engines import MetaParameters, ParallelLayout, RankModel
from streamer.errors import CheckpointError, ConfigError, UnsupportedCheckpointError

__all__ = ["SglangEngine"]


class SglangEngine:
    """The `streamer.engines.Engine` of SGLang. Needs neither a GPU nor other processes.

    Raises:
        ImportError: SGLang is not installed.
    """

    def __init__(self) -> None:
        logging.getLogger("sglang").setLevel(logging.ERROR)  # the command line has output of its own
        import sglang.srt.server_args  # noqa: F401

    def build(self, folder: Path, layout: ParallelLayout, rank: int) -> RankModel:
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} has no config.json, which says what model this is", hint="put it beside the weights"
            )
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import DefaultModelLoader, _get_quantization_config, _initialize_model

        arguments = _arguments(folder, layout)
        device = torch.device("cpu")
        with _as_rank(arguments, folder, rank) as model_config, device, MetaParameters():
            load_config = LoadConfig()
            try:
                quantisation = _get_quantization_config(model_config, load_config)
                model = _initialize_model(model_config, load_config, quantisation)
            except (AssertionError, NotImplementedError, ValueError) as error:
                raise ConfigError(f"SGLang cannot spread this model like that: {error}") from error

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            with _as_rank(arguments, folder, rank):
                return DefaultModelLoader.load_weights_only(model, weights, device)

        return RankModel(model, load_weights)


def _arguments(folder: Path, layout: ParallelLayout) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(folder),
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        tp_size=layout.tensor,
        pp_size=layout.pipeline,
        ep_size=layout.tensor if layout.experts else 1,
        # Nothing is run. These would be refused for some models, or look for a GPU.
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        mamba_radix_cache_strategy="no_buffer",
    )


@contextmanager
def _as_rank(arguments: Any, folder: Path, rank: int) -> Iterator[Any]:
    """Be one rank, and yield the model's configuration."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype

    with ExitStack() as stack:
        try:
            stack.enter_context(pretend(arguments, rank=rank))
            model_config = ModelConfig.from_server_args(arguments)
            get_model_architecture(model_config)
        except (AssertionError, KeyError, NotImplementedError, ValueError) as error:
            raise UnsupportedCheckpointError(f"SGLang does not take {folder}: {error}") from error
        stack.enter_context(set_default_torch_dtype(model_config.dtype))
        yield model_config
