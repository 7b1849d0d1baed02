"""Brings staged weights into a model that is served, layer by layer, to where its kernels have them.

With vLLM's own functions for reloading (``vllm/model_executor/model_loader/reload``): a layer gets memory in the form
in which it is loaded, is processed as after a load, and the results are copied into the tensors that it had, whose
addresses CUDA graphs have captured. Unlike there, a layer is touched only when its new values are complete, so that one
whose processing fails, for want of device memory perhaps, is as it was.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from streamer.errors import CheckpointError, LoadError, shorten
from streamer.trace.pending import storage_key
from vllm_s3stream.update.graft import graft
from vllm_s3stream.update.layout import Layer, Layout, Place, Tensors
from vllm_s3stream.update.twins import Staged
from vllm_s3stream.versions import require

__all__ = ["Commit", "refuse_torn_ties", "require_reload"]

#: What attention layers are loaded with and have no more afterwards; vLLM makes them anew for the occasion.
_SCALES = frozenset({"q_scale", "k_scale", "v_scale", "prob_scale"})
_NO_UPDATE = "this layer cannot be updated in place: start another engine"


def require_reload() -> None:
    """See that this vLLM has what we use of its reloading.

    Raises:
        MissingDependencyError: it has not.
    """
    from vllm.model_executor.model_loader.reload import layerwise, meta

    require(layerwise, "get_layerwise_info", "_copy_and_restore_kernel_tensors", "_finalize_attention_layer")
    require(layerwise, "is_deferred_attention_layer")
    require(meta, "restore_layer_on_meta", "materialize_layer", "SKIP_TENSORS", "SKIP_MODULES")


def refuse_torn_ties(layout: Layout, staged: Staged) -> None:
    """See that tensors which share memory since they were loaded have equal new values.

    vLLM ties an output head to the embeddings when it finds them equal
    (``vllm/model_executor/model_loader/weight_tying.py``).

    Raises:
        CheckpointError: they have not.
    """
    first: dict[tuple[int, int, torch.Size], Place] = {}
    for layer in layout.layers:
        held = {**layer.module._parameters, **layer.module._buffers}
        for name, place in layer.loaded().items():
            served = held.get(name)
            if served is None or place not in staged or not served.numel():
                continue
            other = first.setdefault((storage_key(served), int(served.storage_offset()), served.shape), place)
            if other.storage != place.storage and not torch.equal(staged[other], staged[place]):
                raise CheckpointError(
                    f"{other.name} and {place.name} were equal when the model was loaded, and have shared memory "
                    "since; in the new weights they differ",
                    hint="start another engine with these",
                )


class Commit:
    """Puts new values into a model's layers.

    Args:
        model_config: a ``vllm.config.ModelConfig``.

    Attributes:
        begun: modules that were written to.
    """

    def __init__(self, layout: Layout, model_config: Any) -> None:
        self._layout = layout
        self._model_config = model_config
        self.begun: set[nn.Module] = set()

    @torch.no_grad()
    def run(self, staged: Staged, *, only: set[nn.Module] | None = None) -> None:
        """Put `staged` into the layers.

        Args:
            only: leave the other layers as they are.

        Raises:
            Exception: whatever vLLM raises; `begun` says which layers are new, or a mixture.
        """
        from vllm.model_executor.model_loader.reload.layerwise import is_deferred_attention_layer

        last = []
        with contextlib.ExitStack() as stack:
            for layer in self._layout.layers:
                new = {name: staged[place] for name, place in layer.loaded().items() if place in staged}
                if is_deferred_attention_layer(layer.module):
                    last.append((layer, new))  # some derive values from layers beside them
                elif new and (only is None or layer.module in only):
                    self._replace(layer, new, stack)
            # If one of these was begun, all of the others were: what they derive from is there again.
            for layer, new in last:
                if only is None or layer.module in only:
                    self._finish_attention(layer, new)
        staged.clear()
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # errors of the device are those of this step
            torch.accelerator.empty_cache()

    def _replace(self, layer: Layer, new: dict[str, torch.Tensor], stack: contextlib.ExitStack) -> None:
        from vllm.model_executor.model_loader.reload import layerwise, meta

        module = layer.module
        info = layerwise.get_layerwise_info(module)
        before = Tensors.of(module)
        method: Any = getattr(module, "quant_method", None)
        method_before = {} if method is None else dict(vars(method))
        info.kernel_tensors = (_present(before.parameters), _present(before.buffers))
        info.kernel_non_persistent_buffers = before.transient
        # Names of buffers that are not part of a state dict, which are copied only if they were loaded.
        info.loaded_weights = [(name, _arguments(tensor)) for name, tensor in new.items()]
        kept = _Addresses(before)
        try:
            meta.restore_layer_on_meta(module, info)
            meta.materialize_layer(module, info)
            views = [name for name in new if name in layer.buffers and name not in module._buffers]
            _fill(layer, new)
            _process(layer, method)
            emptied = _emptied(module, before)
            _refuse_other_forms(layer, before, emptied)
            self.begun.add(module)
            for name in emptied:
                del info.kernel_tensors[0][name]
            layerwise._copy_and_restore_kernel_tensors(module, info)
            _fill_views(layer, before, {name: new[name] for name in views})
        except BaseException:
            if module not in self.begun:
                before.put_back(attributes=True)
            if method is not None:
                _set_attributes(method, method_before)
            raise
        finally:
            info.reset()
            before.put_back(attributes=False)
        if method is not None:
            made = dict(vars(method))
            _set_attributes(method, method_before)
            graft(vars(method), made)
        kept.check()
        for name, tensor in emptied.items():
            # Whoever emptied it, an attention layer, will look at it once more.
            held: Any = module._parameters
            held[name] = tensor
            stack.callback(held.__setitem__, name, before.parameters[name])

    def _finish_attention(self, layer: Layer, new: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        module = layer.module
        info = layerwise.get_layerwise_info(module)
        before = Tensors.of(module)
        info.kernel_tensors = (_present(before.parameters), _present(before.buffers))
        info.kernel_non_persistent_buffers = before.transient
        info.loaded_weights = [(name, _arguments(tensor)) for name, tensor in new.items()]
        info.load_numel = len(new)
        unknown = new.keys() - before.parameters.keys() - before.buffers.keys() - _SCALES
        if unknown:
            raise LoadError(f"{layer.name} is loaded with {shorten(sorted(unknown))}, and has no such tensors any more")
        kept = _Addresses(before)
        self.begun.add(module)
        try:
            layerwise._finalize_attention_layer(module, info, self._model_config)
            _copy_back(layer, before)
        finally:
            info.reset()
            before.put_back(attributes=False)
        kept.check()


def _set_attributes(owner: Any, attributes: dict[str, Any]) -> None:
    vars(owner).clear()
    vars(owner).update(attributes)


def _emptied(module: nn.Module, before: Tensors) -> dict[str, torch.Tensor]:
    """Return the weights that the processed layer has and did not have before: something else had emptied them."""
    return {
        name: tensor
        for name, tensor in module._parameters.items()
        if tensor is not None
        and tensor.numel()
        and before.parameters.get(name) is not None
        and not before.parameters[name].numel()
    }


def _copy_back(layer: Layer, before: Tensors) -> None:
    """Bring what processing has put in the place of tensors to where those are.

    Raises:
        LoadError: it does not fit.
    """
    now = {**layer.module._parameters, **layer.module._buffers}
    for name, old in {**before.parameters, **before.buffers}.items():
        new = now.get(name)
        if old is None or new is None or new is old:
            continue
        if old.shape != new.shape or old.dtype != new.dtype:
            raise _other_form(f"{layer.name}.{name}", old, new)
        old.data.copy_(new)


def _refuse_other_forms(layer: Layer, before: Tensors, emptied: Collection[str]) -> None:
    """See, before anything is overwritten, that what processing made fits where it belongs.

    Raises:
        LoadError: it does not.
    """
    for name, old in {**before.parameters, **before.buffers}.items():
        new = getattr(layer.module, name, None)
        if old is None or name in emptied:
            continue
        if new is None:
            if name in before.parameters:
                raise LoadError(f"{layer.name}.{name} was not made again when the layer was processed", hint=_NO_UPDATE)
            continue  # a view, see `_fill_views`
        if old.shape != new.shape or old.dtype != new.dtype:
            raise _other_form(f"{layer.name}.{name}", old, new)


def _fill_views(layer: Layer, before: Tensors, views: dict[str, torch.Tensor]) -> None:
    """Fill buffers that were views of parameters when they were loaded, and are not any more.

    vLLM takes them for views, and leaves them out. Where kernels have packed the parameter, they are copies.
    """
    shared = {storage_key(parameter) for parameter in layer.module.parameters()}
    for name, tensor in views.items():
        served = before.buffers.get(name)
        if served is None or storage_key(served) in shared:
            continue
        if not layer.places()[name].fits(served):
            raise _other_form(f"{layer.name}.{name}", served, tensor)
        served.data.copy_(tensor)


def _present(held: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def _load_whole(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


def _arguments(tensor: torch.Tensor) -> inspect.BoundArguments:
    return inspect.signature(_load_whole).bind(None, tensor)


def _fill(layer: Layer, new: dict[str, torch.Tensor]) -> None:
    """Give the layer, which has memory now, its new values.

    vLLM leaves some tensors in place, such as biases, for its loaders to overwrite; they get stand-ins here.
    """
    module = layer.module
    for name, place in layer.places().items():
        value = new.get(name, place.initial)
        if value is None:
            continue
        held: Any = module._parameters if name in layer.parameters else module._buffers
        tensor = held.get(name)
        if tensor is None and not place.is_late:
            continue  # a view of another one, which vLLM leaves out here
        if tensor is None or _is_left_in_place(module, name):
            device = next(module.parameters()).device if tensor is None else tensor.device
            bare = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=device)
            tensor = held[name] = place.dress(bare)
        else:
            place.dress(tensor)
        tensor.data.copy_(value)


def _is_left_in_place(module: nn.Module, name: str) -> bool:
    from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, SKIP_TENSORS

    return name in SKIP_TENSORS or type(module).__name__ in SKIP_MODULES


def _process(layer: Layer, method: Any) -> None:
    """Have vLLM bring one layer into the form of its kernels, as ``process_weights_after_loading`` there does.

    Some methods do less when they find what they made the first time, which is right only where kernels take weights
    as they are loaded. So they find what they found then.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    module = layer.module
    vars(module).pop("_already_called_process_weights_after_loading", None)
    if isinstance(method, QuantizeMethodBase):
        _set_attributes(method, layer.method)
        method.process_weights_after_loading(module)
        reconcile: Any = getattr(module, "update_param_tp_status", None)
        if reconcile is not None:
            reconcile()


class _Addresses:
    """Where a layer's tensors are, parameters, buffers and attributes, so that they are there afterwards."""

    def __init__(self, before: Tensors) -> None:
        self._before = before
        self._data = [(tensor, tensor.data) for tensor in before.all()]

    def check(self) -> None:
        """Bring values that came to lie elsewhere to where they are expected.

        Raises:
            LoadError: they do not fit there.
        """
        attributes = vars(self._before.module)
        for name, old in self._before.attributes.items():
            if name in attributes and attributes[name] is not old:
                attributes[name] = graft(old, attributes[name])
        for tensor, data in self._data:
            if tensor.data_ptr() != data.data_ptr():
                if (data.shape, data.dtype) != (tensor.shape, tensor.dtype):
                    raise _other_form("a tensor", data, tensor)
                data.copy_(tensor)
                tensor.data = data


def _other_form(name: str, old: torch.Tensor, new: torch.Tensor) -> LoadError:
    return LoadError(
        f"{name} is {new.dtype} {list(new.shape)} after processing and was {old.dtype} {list(old.shape)}",
        hint=_NO_UPDATE,
    )
