"""The library without an engine: a rank's part of a tensor, and ordinary tensors one after the other.

    MODEL_URL=s3://bucket/org/model python examples/python/library.py

``MODEL_URL`` may be anything that the library reads. ``TENSOR`` names a matrix of the checkpoint; without it the first
one with two dimensions is taken. ``RANK`` of ``WORLD_SIZE`` takes its share of the rows. Options are ``S3STREAM_*``
variables: ``S3STREAM_ENDPOINT_URL=http://127.0.0.1:9000``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

import streamer


class Rows(torch.nn.Module):
    """This rank's rows of one matrix, loaded as engines load theirs: whole tensors come in, and it takes what it wants.

    `streamer.load` runs `load_weights` on tensors without data and fetches what it copies. That is all that a model
    has to have; one without the method is loaded by the names of its state dict.
    """

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, rank: int, ranks: int) -> None:
        super().__init__()
        self.name = name
        self.first, end = shape[0] * rank // ranks, shape[0] * (rank + 1) // ranks
        self.weight = torch.nn.Parameter(torch.empty(end - self.first, shape[1], dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name == self.name:
                self.weight.copy_(tensor[self.first : self.first + len(self.weight)])
        return {"weight"}


def main() -> None:
    url, wanted = os.environ["MODEL_URL"], os.environ.get("TENSOR")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    # Each tensor owns its memory. Leaving the loop, and so closing the iterator, stops the reads.
    for name, tensor in streamer.iterate(url, {"buffer_bytes": "64MiB"}):
        if name == wanted or (wanted is None and tensor.dim() == 2):
            break
    else:
        raise SystemExit(f"{url} has no tensor {wanted or 'with two dimensions'}")
    print(f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}")

    model = Rows(name, tensor.shape, tensor.dtype, rank, ranks)
    report = streamer.load(model, url, {"buffer_bytes": "64MiB"})
    assert torch.equal(model.weight, tensor[model.first : model.first + len(model.weight)])
    print(f"rank {rank} of {ranks} holds {len(model.weight)} rows and fetched {report.fetched_bytes} bytes for them")
    print(report.summary())


if __name__ == "__main__":
    main()
