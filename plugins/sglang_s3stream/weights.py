"""Which files and tensors SGLang's own loader would read, where that is not what an index says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamer.artifacts.locate import Located
from streamer.checkpoint.checkpoint import Checkpoint, TensorInfo

__all__ = ["LayerOfSeveral", "files_to_load"]

_INDEX = "model.safetensors.index.json"
_MTP_FILE = "mtp.safetensors"
_MTP_ARCHITECTURES = frozenset(
    name + suffix for name in ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM") for suffix in ("", "NextN")
)
_MTP_LAYER = re.compile(r"model\.mtp\.layers\.(\d+)\.")


def files_to_load(located: Located, patterns: Sequence[str] | None, hf_config: Any) -> list[str]:
    """Return the files to load, if the model's code or a rule of SGLang's leaves no choice; else nothing.

    Args:
        patterns: the model's ``allow_patterns_overrides``; the first with any matches counts.

    Raises:
        CheckpointError: no pattern matches.
        UnsupportedCheckpointError: what matches is not safetensors.
    """
    if patterns is not None:
        return located.chosen(patterns)
    if _MTP_FILE not in located.keys or not _predicts_several(hf_config):
        return []
    # Published quantisations of GLM have this file, and an index that does not name it
    # (``weight_utils.maybe_add_mtp_safetensors``).
    index = located.folder / _INDEX
    if not index.is_file():
        return sorted(key for key in located.keys if "/" not in key and key.endswith(".safetensors"))
    indexed = set(json.loads(index.read_text())["weight_map"].values())
    return [] if _MTP_FILE in indexed else [*sorted(indexed), _MTP_FILE]


def _predicts_several(hf_config: Any) -> bool:
    architectures = getattr(hf_config, "architectures", None) or [None]
    text = getattr(hf_config, "text_config", hf_config)
    layers = getattr(text, "num_nextn_predict_layers", getattr(hf_config, "num_nextn_predict_layers", 0))
    return architectures[0] in _MTP_ARCHITECTURES and bool(layers)


@dataclass(frozen=True, slots=True)
class LayerOfSeveral:
    """The one of several prediction layers that a draft model consists of (``DefaultModelLoader._filter_mtp_weights``).

    Attributes:
        number: of the layer in the checkpoint; the draft model calls it 0.
    """

    number: int

    @classmethod
    def parse(cls, draft_model_idx: int | None) -> LayerOfSeveral | None:
        return None if draft_model_idx is None else cls(draft_model_idx)

    def keeps(self, checkpoint: Checkpoint, info: TensorInfo) -> bool:
        """Whether a tensor belongs to no prediction layer, or to this one."""
        match = _MTP_LAYER.match(info.name)
        return match is None or int(match[1]) == self.number

    def rename(self, name: str) -> str:
        """Return the draft model's name for a tensor."""
        return _MTP_LAYER.sub("model.mtp.layers.0.", name, count=1)
