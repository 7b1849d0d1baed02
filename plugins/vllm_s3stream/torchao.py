"""Checkpoints that torchao quantised: tensor subclasses taken apart into plain tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from streamer.errors import MissingDependencyError
from streamer.session import LoadSession, OpenedPart

__all__ = ["unflattened"]


def unflattened(session: LoadSession, part: OpenedPart) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the subclasses, put together again from real tensors, as vLLM's own iterator does.

    A subclass's parts may lie in two files, so what is left over is carried on to the next
    (``safetensors_weights_iterator`` in ``vllm/model_executor/model_loader/weight_utils.py``).
    """
    try:
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    except ImportError as error:
        raise MissingDependencyError(
            "this checkpoint was quantised by torchao, which is not installed", hint="pip install 'torchao>=0.15'"
        ) from error
    infos = {info.name: info for info in part.tensors}
    left: dict[str, torch.Tensor] = {}
    weights = session.weights(part, mode="eager")
    for number, group in itertools.groupby(weights, key=lambda item: infos[item[0]].file):
        state = {**left, **dict(group)}
        metadata = part.checkpoint.files[number - part.first_file].metadata
        whole, left = unflatten_tensor_state_dict(state, metadata)
        yield from whole.items()
