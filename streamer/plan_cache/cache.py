"""Finds the recipe for a load, or watches the load to make one."""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.parameter import is_lazy

import streamer
from streamer.cache import cache_folder
from streamer.checkpoint.checkpoint import TensorInfo
from streamer.config import StreamConfig
from streamer.plan_cache.description import Description, IsOpaque, describe, digest_of_code
from streamer.plan_cache.files import RecipeFiles
from streamer.plan_cache.recipe import Recipe
from streamer.plan_cache.recorder import Recorder, Unrepeatable
from streamer.report import PlanCacheUse
from streamer.trace.collector import fewer_full_collections
from streamer.trace.tracer import Tracer, Weights

__all__ = ["Circumstances", "PlanUse"]


def _nothing_is_opaque(kind: type) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What an engine's loading code may go by, beside the model and the checkpoint.

    Attributes:
        facts: the engine, its version, settings, parallel layout and this process's rank in it.
        is_opaque: which classes' objects, found in the model, are told by `facts` or have nothing to do with loading.
    """

    facts: Mapping[str, str]
    is_opaque: IsOpaque = field(default=_nothing_is_opaque)


class PlanUse:
    """What the plan cache does for one load.

    Args:
        circumstances: None if this way of loading has no plans.

    Attributes:
        recipe: what to do instead of running the model's code.
        recorder: watches it otherwise, if there is to be a recipe.
    """

    def __init__(
        self,
        config: StreamConfig,
        model: object,
        circumstances: Circumstances | None,
        tensors: Sequence[TensorInfo],
    ) -> None:
        self.recipe: Recipe | None = None
        self.recorder: Recorder | None = None
        self._why = _objection(config, model, circumstances)
        self._model = model
        if self._why or circumstances is None or not isinstance(model, torch.nn.Module):
            return
        self._is_opaque = circumstances.is_opaque
        self._before = describe(model, self._is_opaque)
        try:
            code = digest_of_code(self._before.code)
        except LookupError as error:
            self._why = str(error)
            return
        self._key = _key(circumstances.facts, self._before, code, tensors)
        self._files = RecipeFiles(cache_folder(config, "plans"))
        self.recipe = self._files.read(self._key)
        if self.recipe is None:
            self.recorder = Recorder(self._before)

    @classmethod
    @fewer_full_collections()  # as a trace has: the headers are read in here, and a plan has as many objects
    def begin(
        cls,
        config: StreamConfig,
        model: object,
        circumstances: Circumstances | None,
        weights: Weights,
        tensors: Callable[[], Sequence[TensorInfo]],
    ) -> tuple[PlanUse, Weights]:
        """Look at what `weights` will be, and return them as they were.

        Args:
            tensors: returns those of the checkpoint, once the first of `weights` was asked for, since engines open
                checkpoints then.
        """
        weights = iter(weights)
        begun = list(itertools.islice(weights, 1))
        return cls(config, model, circumstances, tensors()), itertools.chain(begun, weights)

    def watch(self, weights: Weights, tracer: Tracer) -> Weights:
        """Hand out `weights` and watch what becomes of them, if there is to be a recipe."""
        tracer.copies.watcher = self.recorder
        return weights if self.recorder is None else self.recorder.watch(weights)

    @fewer_full_collections()
    def finish(self, returned: object, tracer: Tracer, parts: int) -> PlanCacheUse:
        """Keep what the load was, if it can be done again without the model's code.

        Args:
            returned: by ``load_weights``.
            tracer: of the load, which is over.
            parts: checkpoints that it was loaded from.
        """
        if self.recipe is not None:
            return PlanCacheUse("used", "")
        if self.recorder is None or not isinstance(self._model, torch.nn.Module):
            return PlanCacheUse("not used", self._why)
        try:
            if parts > 1:
                raise Unrepeatable(f"it was loaded from {parts} checkpoints")
            if forced := tracer.values.materialised:
                raise Unrepeatable(f"its code looks at values of the checkpoint: {forced[0].operation}")
            after = describe(self._model, self._is_opaque)
            recipe = self.recorder.recipe(self._model, after, returned, tracer.bases)
        except Unrepeatable as error:
            return PlanCacheUse("not used", str(error))
        if not self._files.keep(self._key, recipe):
            return PlanCacheUse("not used", "it could not be kept, see the log")
        return PlanCacheUse("kept", "")


def _objection(config: StreamConfig, model: object, circumstances: Circumstances | None) -> str:
    if config.mode != "trace":
        return f"mode={config.mode} traces nothing"
    if circumstances is None:
        return "this way of loading has none"
    if not isinstance(model, torch.nn.Module):
        return f"{type(model).__name__} is no torch.nn.Module"
    if any(map(is_lazy, model.parameters())) or any(tensor.is_meta for tensor in model.parameters()):
        return "the model gets memory while it is loaded"
    return ""


def _key(facts: Mapping[str, str], model: Description, code: str, tensors: Sequence[TensorInfo]) -> str:
    headers = repr([(info.name, info.dtype, info.shape, info.file, info.start) for info in tensors])
    about = {
        "s3stream": streamer.__version__,
        "python": platform.python_version(),
        "torch": [torch.__version__, str(torch.get_default_dtype())],
        "facts": dict(facts),
        "model": model.digest(),
        "code": code,
        "headers": hashlib.sha256(headers.encode()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
