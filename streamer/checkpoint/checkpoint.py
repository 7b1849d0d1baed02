"""A checkpoint as its headers describe it: which tensor lies at which bytes of which object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamer.checkpoint.header import FileHeader
from streamer.checkpoint.index import Index
from streamer.checkpoint.select import Listed, Skipped
from streamer.errors import IncompleteCheckpointError, shorten

__all__ = ["Checkpoint", "CheckpointFile", "TensorInfo", "assemble"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor.

    Attributes:
        dtype: its name in the header, such as ``BF16``.
        shape: as in the header; packed F4 counts single elements.
        file: position in `Checkpoint.files`.
        start, end: byte range in that file, half open.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of weights: key relative to the root, sizes in bytes."""

    key: str
    size: int
    header_bytes: int
    tensor_count: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All headers of a checkpoint, in file order and then data order.

    Attributes:
        url: where it was read from.
        unindexed: tensors that are in the files but not in the index. They are loaded: dropping them
            silently would leave default values in the model.
    """

    url: str
    files: tuple[CheckpointFile, ...]
    tensors: Mapping[str, TensorInfo]
    skipped: tuple[Skipped, ...] = ()
    metadata_files: tuple[Listed, ...] = ()
    unindexed: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def origins(self) -> list[list[int]]:
        """Return where the tensors of each file begin, in order."""
        found: list[list[int]] = [[] for _ in self.files]
        for info in self.tensors.values():
            found[info.file].append(info.start)
        return found

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes per dtype name, largest first."""
        totals: Counter[str] = Counter()
        for tensor in self.tensors.values():
            totals[tensor.dtype] += tensor.nbytes
        return dict(totals.most_common())


def assemble(
    url: str,
    weights: Sequence[Listed],
    headers: Sequence[FileHeader],
    *,
    index: Index | None,
    skipped: tuple[Skipped, ...] = (),
    metadata_files: tuple[Listed, ...] = (),
) -> Checkpoint:
    """Join the headers of `weights`, checking them against each other and the index in both directions.

    Raises:
        IncompleteCheckpointError: a tensor is in two files, or is not where the index says.
    """
    tensors: dict[str, TensorInfo] = {}
    for position, (listed, header) in enumerate(zip(weights, headers, strict=True)):
        for entry in header.tensors:
            earlier = tensors.get(entry.name)
            if earlier is not None:
                raise IncompleteCheckpointError(
                    f"{url}: tensor {entry.name!r} is in both {weights[earlier.file].key} and {listed.key}",
                    hint="keep one copy of the weights, or add the index that tells them apart",
                )
            tensors[entry.name] = TensorInfo(entry.name, entry.dtype, entry.shape, position, entry.start, entry.end)
    unindexed = _compare_with_index(url, weights, tensors, index) if index is not None else ()
    files = tuple(
        CheckpointFile(listed.key, listed.size, header.data_start, len(header.tensors), header.metadata)
        for listed, header in zip(weights, headers, strict=True)
    )
    return Checkpoint(url, files, tensors, skipped, metadata_files, unindexed)


def _compare_with_index(
    url: str, weights: Sequence[Listed], tensors: Mapping[str, TensorInfo], index: Index
) -> tuple[str, ...]:
    absent, misplaced = [], []
    for name, key in index.weight_map.items():
        info = tensors.get(name)
        if info is None:
            absent.append(f"{name} ({key})")
        elif weights[info.file].key != key:
            misplaced.append(f"{name} (in {weights[info.file].key}, not {key})")
    problems = []
    if absent:
        problems.append(f"names {len(absent)} tensors that no file holds: {shorten(absent)}")
    if misplaced:
        problems.append(f"maps {len(misplaced)} tensors to the wrong file: {shorten(misplaced)}")
    if problems:
        raise IncompleteCheckpointError(
            f"{url}: {index.key} {'; it '.join(problems)}",
            hint="upload the index and the files of one revision, or set index=ignore",
        )
    return tuple(name for name in tensors if name not in index.weight_map)
