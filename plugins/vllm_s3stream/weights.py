"""Which of the weights of one of vLLM's sources to hand out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamer.checkpoint.checkpoint import Checkpoint, TensorInfo
from streamer.errors import CheckpointError

__all__ = ["ShardFilter"]


class ShardFilter:
    """Decides, as vLLM's loader does, which tensors a model is not even shown.

    vLLM leaves out whole files, when nothing in them is wanted, and expert weights of other ranks.

    Args:
        folder: holds the index, by which vLLM tells the language model's files.
        is_unused: accepts the names of tensors that the model does not load.
        encoder_only_prefixes, weights_mapper: with ``--mm-encoder-only``, what belongs to the language model.
        local_expert_ids: this rank's, or None for all.
    """

    def __init__(
        self,
        folder: Path,
        *,
        is_unused: Callable[[str], bool] | None,
        encoder_only_prefixes: tuple[str, ...] | None,
        weights_mapper: Any,
        local_expert_ids: set[int] | None,
    ) -> None:
        self._folder = folder
        self._is_unused = is_unused
        self._prefixes = encoder_only_prefixes
        self._mapper = weights_mapper
        self._experts = local_expert_ids
        self._wanted: frozenset[int] | None = None

    def __call__(self, checkpoint: Checkpoint, info: TensorInfo) -> bool:
        if self._wanted is None:
            self._wanted = self._wanted_files(checkpoint)
        if info.file not in self._wanted:
            return False
        if self._experts is None:
            return True
        from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

        return not should_skip_weight(info.name, self._experts)

    def _wanted_files(self, checkpoint: Checkpoint) -> frozenset[int]:
        wanted = set(range(len(checkpoint.files)))
        if self._prefixes is not None:
            wanted &= self._with_encoder(checkpoint)
        if self._is_unused is not None:
            used = {info.file for info in checkpoint.tensors.values() if not self._is_unused(info.name)}
            wanted = (wanted & used) or wanted  # vLLM reads everything rather than nothing
        return frozenset(wanted)

    def _with_encoder(self, checkpoint: Checkpoint) -> set[int]:
        from vllm.model_executor.model_loader.weight_utils import filter_mm_encoder_only_safetensors_files

        index = next((path.name for path in sorted(self._folder.glob("*.safetensors.index.json"))), "")
        paths = {os.path.join(self._folder, file.key): number for number, file in enumerate(checkpoint.files)}
        kept = filter_mm_encoder_only_safetensors_files(
            list(paths), str(self._folder), index, self._prefixes, weights_mapper=self._mapper
        )
        if not kept:
            raise CheckpointError(
                f"{checkpoint.url}: every file holds the language model only, and --mm-encoder-only leaves it out"
            )
        return {paths[path] for path in kept}
