"""Checkpoints that vLLM's ``save_sharded_state`` wrote: a state dict, with files of its own for each rank."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamer.artifacts.locate import Located
from streamer.errors import ConfigError, IncompleteCheckpointError, LoadError, shorten
from vllm_s3stream.versions import require

__all__ = ["ShardPattern", "files_of_this_rank", "fill_state_dict"]

_TENSOR_FIELDS = ("rank", "tp_rank")


@dataclass(frozen=True, slots=True)
class ShardPattern:
    """A file name with fields, such as ``model-rank-{rank}-part-{part}.safetensors``.

    Fields are those of ``vllm/model_executor/model_loader/sharded_state_loader.py``: ``rank`` or ``tp_rank``,
    ``pp_rank`` and ``part``.

    Raises:
        ConfigError: an unknown field, or none for the part.
    """

    text: str

    def __post_init__(self) -> None:
        fields = {field for _, field, _, _ in string.Formatter().parse(self.text) if field is not None}
        unknown = sorted(fields - {*_TENSOR_FIELDS, "pp_rank", "part"})
        if unknown or "part" not in fields:
            raise ConfigError(
                f"pattern {self.text!r} {f'has unknown fields {shorten(unknown)}' if unknown else 'has no {part}'}",
                hint="fields are {rank} or {tp_rank}, {pp_rank} and {part}",
            )

    def ranks(self, keys: Sequence[str]) -> dict[tuple[int, int], list[str]]:
        """Sort the file names that match by pipeline stage and tensor-parallel rank."""
        expression = ""
        for literal, field, _, _ in string.Formatter().parse(self.text):
            expression += re.escape(literal)
            if field is not None:
                group = "stage" if field == "pp_rank" else "rank" if field in _TENSOR_FIELDS else "part"
                expression += f"(?P={group})" if f"(?P<{group}>" in expression else rf"(?P<{group}>\d+)"
        found: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for key in keys:
            match = re.fullmatch(expression, key)
            if match:
                groups = match.groupdict()
                place = int(groups.get("stage", 0)), int(groups.get("rank", 0))
                found.setdefault(place, []).append((int(groups["part"]), key))
        return {place: [key for _, key in sorted(parts)] for place, parts in sorted(found.items())}


def files_of_this_rank(located: Located, pattern: str | None) -> list[str]:
    """Return the files that hold this rank's state dict, in the order of their parts.

    Raises:
        IncompleteCheckpointError: the files are those of other ranks than this engine has.
    """
    from vllm import distributed

    stages = distributed.get_pp_group().world_size
    ranks = distributed.get_tensor_model_parallel_world_size()
    shards = ShardPattern(pattern or _default_pattern(stages))
    found = shards.ranks(located.keys)
    wanted = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
    if list(found) != wanted:
        raise IncompleteCheckpointError(
            f"{located.url} has files named {shards.text} for {_describe(list(found), stages)}, "
            f"and this engine has {_describe(wanted, stages)}",
            hint="use the parallel sizes that the checkpoint was saved with, or save it anew",
        )
    return found[distributed.get_pp_group().rank_in_group, distributed.get_tensor_model_parallel_rank()]


def _default_pattern(stages: int) -> str:
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader as Theirs

    by_stage = getattr(Theirs, "PP_AND_TP_PATTERN", None)  # since 0.30
    name = by_stage if stages > 1 and by_stage else getattr(Theirs, "TP_ONLY_PATTERN", None)
    return str(name or Theirs.DEFAULT_PATTERN)


def _describe(places: Sequence[tuple[int, int]], stages: int) -> str:
    if not places:
        return "no rank at all"
    if stages == 1 and all(stage == 0 for stage, _ in places):
        return f"tensor-parallel ranks {shorten([str(rank) for _, rank in places])}"
    return f"stages and ranks {shorten([f'{stage}/{rank}' for stage, rank in places])}"


def state_dict_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that ``save_sharded_state`` writes: of those that share memory, one."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader as Theirs

    require(Theirs, "_filter_subtensors")
    state: dict[str, torch.Tensor] = Theirs._filter_subtensors(model.state_dict())
    return state


def fill_state_dict(model: nn.Module) -> Callable[[Iterable[tuple[str, torch.Tensor]]], Mapping[str, Any]]:
    """Return a function that copies tensors into the state dict of `model`, by name.

    A tensor may be smaller than its place: with LoRA, vLLM pads embeddings for additional words.

    Raises:
        LoadError: a tensor has no place, or does not fit it.
        IncompleteCheckpointError: places are left.
    """
    state = state_dict_of(model)

    def fill(weights: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, Any]:
        left = dict(state)
        for name, tensor in weights:
            place = left.pop(name, None)
            if place is None:
                raise LoadError(f"the model's state dict has no place for {name}")
            if place.dim() != tensor.dim() or any(
                have < need for have, need in zip(place.shape, tensor.shape, strict=True)
            ):
                raise LoadError(f"{name} has shape {list(tensor.shape)} and its place {list(place.shape)}")
            target = place.data
            for dimension, size in enumerate(tensor.shape):
                target = target.narrow(dimension, 0, size)
            target.copy_(tensor)
        if left:
            raise IncompleteCheckpointError(f"this rank's files lack {len(left)} tensors: {shorten(sorted(left))}")
        return state

    return fill
