"""The rules that make deferral invisible, one by one. Leaving one out broke real models."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.dlpack

import streamer
from streamer.errors import LeakedLazyTensorError, LoadError, MissingParametersError
from streamer.trace.barrier import tracing
from streamer.trace.lazy import LazyTensor
from streamer.trace.storages import ModelStorages
from streamer.trace.tracer import Tracer
from tests.trace.loading import Model, Weights, load_all_ways, source_of

STATE = {name: torch.arange(48.0).reshape(8, 6) + 100 * n for n, name in enumerate("abcd")} | {"v": torch.arange(6.0)}


def operations(report: streamer.LoadReport) -> list[str]:
    return [read.operation for read in report.materialised]


def test_column_and_row_slices_are_fetched_alone() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.w.data[:4].copy_(tensor.narrow(0, 4, 4))
            elif name == "b":
                model.w.data[4:].copy_(tensor.chunk(2, 0)[0])
            elif name == "c":
                model.x.data.copy_(tensor[:, 2:4])

    report = load_all_ways(loader, {"w": (8, 6), "x": (8, 2)}, STATE)
    assert report.needed_bytes == (24 + 24 + 16) * 4
    assert report.materialised == ()
    assert report.ignored == {"d": "the model passed over it", "v": "the model passed over it"}


def test_rule_1_copies_into_temporaries_happen_at_once() -> None:
    def loader(model: Any, weights: Any) -> list[float]:
        seen = []
        for _, tensor in weights:
            temporary = torch.empty_like(tensor)
            temporary.copy_(tensor)
            seen.append(float(temporary.sum()))
        return seen

    report = load_all_ways(loader, {"w": (1,)}, STATE)
    assert set(operations(report)) == {"aten::copy_ into a temporary"}


def test_rule_1_storages_that_appear_during_the_load_are_found() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name in "abcd":
                model.register_parameter(name, torch.nn.Parameter(torch.empty(8, 6), requires_grad=False))
                getattr(model, name).data.copy_(tensor)

    model = Model(loader, {"w": (1,)})
    report = streamer.load(model, source_of(STATE), {"strict": False})
    assert report.materialised == ()
    assert all(torch.equal(getattr(model, name), STATE[name]) for name in "abcd")


def test_rule_2_a_read_of_pending_bytes_finds_them() -> None:
    """Read-modify-write after the copy: vLLM's `composed_weight_loader`, which mamba2's A goes through."""

    def loader(model: Any, weights: Any) -> float:
        for name, tensor in weights:
            if name == "a":
                model.w.data.copy_(tensor)
                model.w.data.copy_(-torch.exp(model.w.data / 100))
            if name == "b":
                model.x.data.copy_(tensor)
        return float(model.x.sum())

    load_all_ways(loader, {"w": (8, 6), "x": (8, 6)}, STATE)


def test_rule_2_other_bytes_of_the_same_storage_are_left_alone() -> None:
    """Padding rows are zeroed right after the copy, in nearly every model; that must not force a read."""
    pending = []

    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.w.data[:8].copy_(tensor)
                model.w.data[8:].fill_(0)
                model.w.data[10:].fill_(0)  # empty operand
                if isinstance(tensor, LazyTensor):
                    recorder: Any = tensor.lazy_base.tracer
                    pending.append(len(recorder.copies.pending))

    load_all_ways(loader, {"w": (10, 6)}, STATE)
    assert set(pending) == {1}  # in all traced ways


def test_rule_3_later_copies_win_and_dead_ones_are_not_fetched() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name in "ab":
                model.w.data.copy_(tensor)

    report = load_all_ways(loader, {"w": (8, 6)}, STATE)
    assert report.needed_bytes == 48 * 4
    assert report.ignored["a"] == "overwritten by b"


def test_rule_3_partial_overlaps_keep_their_order() -> None:
    def loader(model: Any, weights: Any) -> None:
        for number, (name, tensor) in enumerate(weights):
            if name in "abcd":
                model.w.data[number * 2 : number * 2 + 8].copy_(tensor)

    load_all_ways(loader, {"w": (20, 6)}, STATE)


def test_rule_3_columns_side_by_side_do_not_force_each_other() -> None:
    def loader(model: Any, weights: Any) -> None:
        for number, (name, tensor) in enumerate(weights):
            if name in "abcd":
                model.w.data[:, number * 6 : number * 6 + 6].copy_(tensor)

    report = load_all_ways(loader, {"w": (8, 30)}, STATE)
    assert report.materialised == ()
    assert report.requests <= 3


def test_rule_3_the_destination_is_the_one_at_the_time_of_the_copy() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.w.copy_(tensor)
                model.w.data = torch.zeros(8, 6)

    load_all_ways(loader, {"w": (8, 6)}, STATE)


def test_rule_4_a_write_to_a_checkpoint_tensor_is_kept() -> None:
    """gpt-oss zeroes a bias on every rank but the first, then copies it."""

    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                part = tensor[2:4]
                doubled = tensor * 2
                model.w.data[:8].copy_(tensor)
                part.zero_()
                model.w.data[8:16].copy_(tensor)
                tensor.mul_(3)
                tensor[0, 0] = 7
                model.w.data[16:24].copy_(tensor)
                model.w.data[24:].copy_(doubled)

    report = load_all_ways(loader, {"w": (32, 6)}, STATE)
    assert "aten::zero_" in operations(report)


def test_rule_5_copies_into_meta_fetch_nothing() -> None:
    def loader(model: Any, weights: Any) -> int:
        counted = 0
        for _, tensor in weights:
            stand_in = torch.empty_like(tensor, device="meta")
            stand_in.copy_(tensor)
            counted += stand_in.numel()
        return counted

    report = load_all_ways(loader, {"w": (1,)}, STATE)
    assert (report.needed_bytes, report.fetched_bytes) == (0, 0)


def test_rule_6_pure_functions_stay_deferred_and_need_only_their_views() -> None:
    def loader(model: Any, weights: Any) -> None:
        named = dict(weights)
        model.w.data[:4].copy_(torch.cat([named["a"][:2], named["b"][6:]]))
        model.w.data[4:8].copy_(torch.stack([named["c"][0], named["c"][1]]).repeat(2, 1))
        model.x.data.copy_((named["d"][:, :2].to(torch.float64) + 1).view(torch.int64).view(torch.float64).neg())
        model.y.data.copy_(named["a"].view(torch.int32).t().reshape(12, 4)[:2].view(torch.float32))

    report = load_all_ways(loader, {"w": (8, 6), "x": (8, 2), "y": (2, 4)}, STATE)
    assert report.materialised == ()
    assert report.needed_bytes == (12 + 12 + 12 + 16 + 48) * 4


def test_rule_6_contiguous_before_a_copy_is_the_copy() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.w.data.copy_(tensor[:, :3].contiguous().clone().to(torch.bfloat16))

    report = load_all_ways(loader, {"w": (8, 3)}, STATE, dtype=torch.bfloat16)
    assert report.needed_bytes == 24 * 4
    assert [(cast.source, cast.destination, cast.count) for cast in report.casts] == [
        ("torch.bfloat16", "torch.bfloat16", 1)
    ] or report.casts == ()


def test_rule_6_a_cast_that_loses_is_not_skipped() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.w.data.copy_((tensor / 7).to(torch.bfloat16))

    load_all_ways(loader, {"w": (8, 6)}, STATE)


def test_rule_6_results_keep_the_strides_that_their_views_were_made_with() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.w.data.copy_((tensor.t() + 1)[:, 2:5])  # torch keeps the transposed strides

    load_all_ways(loader, {"w": (6, 3)}, STATE)


def test_rule_6_plain_operands_are_taken_as_they_were() -> None:
    def loader(model: Any, weights: Any) -> None:
        scale = torch.full((6,), 2.0)
        for name, tensor in weights:
            if name == "a":
                scaled = tensor * scale
                scale.fill_(1000)
                model.w.data.copy_(scaled)

    report = load_all_ways(loader, {"w": (8, 6)}, STATE)
    assert report.materialised == ()


def test_rule_6_values_are_fetched_when_they_decide() -> None:
    def loader(model: Any, weights: Any) -> list[object]:
        facts: list[object] = []
        for name, tensor in weights:
            if tensor.dim() == 2:
                facts.append(bool((tensor[0] < 6).all()))
                facts.append(tensor[1, 1].item())
                facts.append(torch.equal(tensor, tensor))
                facts.append(tensor[0].nonzero().shape[0])
                facts.append(int(tensor.argmax()))
                facts.append(f"{float(tensor[0].max()):.1f} {name}")
        return facts

    load_all_ways(loader, {"w": (1,)}, STATE)


def test_rule_7_weights_listed_before_they_are_used() -> None:
    """bert: ``list(weights)`` ends the iterator before anything was copied."""

    def loader(model: Any, weights: Any) -> None:
        for name, tensor in list(weights):
            if name in "ab":
                getattr(model, name).data.copy_(tensor)

    report = load_all_ways(loader, {"a": (8, 6), "b": (8, 6)}, STATE)
    assert report.requests <= 3


def test_rule_7_code_after_the_loop_sees_loaded_parameters() -> None:
    def loader(model: Any, weights: Any) -> list[float]:
        for name, tensor in weights:
            if name in "ab":
                getattr(model, name).data.copy_(tensor)
        return [*model.a.flatten().tolist(), float(model.b.data[7, 5])]

    load_all_ways(loader, {"a": (8, 6), "b": (8, 6)}, STATE)


class Pair(NamedTuple):
    """Of tensors."""

    first: torch.Tensor
    second: Any


def _keep_in_attribute(model: Any, tensor: torch.Tensor) -> None:
    model.kept = tensor


def _keep_result(model: Any, tensor: torch.Tensor) -> None:
    model.kept = tensor[:2] + torch.arange(tensor.shape[1])


def _keep_in_containers(model: Any, tensor: torch.Tensor) -> None:
    model.kept = {"deep": [Pair(tensor[0], 5), (tensor,)], "else": {1, 2}}


def _keep_in_set(model: Any, tensor: torch.Tensor) -> None:
    model.kept = {tensor}


def _keep_on_parameter(model: Any, tensor: torch.Tensor) -> None:
    model.w.kept = tensor


def _keep_in_buffer(model: Any, tensor: torch.Tensor) -> None:
    model.register_buffer("kept", tensor)


KEEP = {
    function.__name__.removeprefix("_keep_"): function
    for function in (
        _keep_in_attribute,
        _keep_result,
        _keep_in_containers,
        _keep_in_set,
        _keep_on_parameter,
        _keep_in_buffer,
    )
}


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for key in value for item in [key, *_flat(value[key])]]
    if isinstance(value, (list, tuple, set)):
        return [type(value).__name__, *(item for element in value for item in _flat(element))]
    return [(type(value), value.tolist()) if isinstance(value, torch.Tensor) else value]


@pytest.mark.parametrize("keep", KEEP)
def test_rule_7_what_a_model_keeps_gets_its_values(keep: str) -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                KEEP[keep](model, tensor)

    kept = {}
    for mode in ("trace", "eager"):
        model: Any = Model(loader, {"w": (1,)})
        report = streamer.load(model, source_of(STATE), {"strict": False, "mode": mode})
        kept[mode] = _flat(model.w.kept if keep == "on_parameter" else model.kept)
        assert [read.operation for read in report.materialised] == (
            [f"the model keeps {'w' if keep == 'on_parameter' else 'kept'}"] if mode == "trace" else []
        )
    assert kept["trace"] == kept["eager"]


def test_rule_7_views_that_a_model_keeps_share_memory() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.whole, model.row, model.again = tensor, [tensor[1]], tensor

    for mode in ("trace", "eager"):
        model: Any = Model(loader, {"w": (1,)})
        streamer.load(model, source_of(STATE), {"strict": False, "mode": mode})
        assert model.whole is model.again
        model.row[0][2] = 77
        assert model.whole[1, 2] == 77


def test_rule_7_a_list_that_a_model_keeps_stays_the_same_list() -> None:
    outside: list[torch.Tensor] = []

    def loader(model: Any, weights: Any) -> None:
        model.kept = outside
        outside.extend(tensor for name, tensor in weights if name == "a")

    streamer.load(Model(loader, {"w": (1,)}), source_of(STATE), {"strict": False})
    assert torch.equal(outside[0], STATE["a"])


@pytest.mark.parametrize("keep", ["as a parameter", "in deep containers"])
def test_rule_7_leaked_lazies_fail_loudly(keep: str) -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                if keep == "as a parameter":
                    model.kept = torch.nn.Parameter(tensor, requires_grad=False)
                else:
                    model.w.kept = [[tensor]]

    if keep == "as a parameter":
        with pytest.raises(LeakedLazyTensorError, match=r"kept.*mode=eager"):
            streamer.load(Model(loader, {"w": (1,)}), source_of(STATE), {"strict": False})
        streamer.load(Model(loader, {"w": (1,)}), source_of(STATE), {"strict": False, "mode": "eager"})
        return
    model: Any = Model(loader, {"w": (1,)})
    streamer.load(model, source_of(STATE), {"strict": False})
    with pytest.raises(LeakedLazyTensorError, match="after its load had ended"):
        model.w.kept[0][0].sum().item()


def test_rule_7_a_lazy_used_after_the_load_raises() -> None:
    outside: list[torch.Tensor] = []

    def loader(model: Any, weights: Any) -> None:
        outside.extend(tensor for _, tensor in weights)

    streamer.load(Model(loader, {"w": (1,)}), source_of(STATE), {"strict": False})
    with pytest.raises(LeakedLazyTensorError, match="after its load had ended"):
        outside[0].sum().item()


def test_rule_8_what_bypasses_the_dispatcher_gets_values() -> None:
    def loader(model: Any, weights: Any) -> list[object]:
        found: list[object] = []
        for name, tensor in weights:
            if name in "abcd":
                found += [
                    tensor.numpy().sum(),
                    tensor.tolist(),
                    torch.utils.dlpack.from_dlpack(tensor).sum().item(),
                    pickle.loads(pickle.dumps(tensor)).sum().item(),
                    copy.deepcopy(tensor).sum().item(),
                    tensor.data_ptr() != 0,
                    tensor.untyped_storage().nbytes(),
                ]
        return found

    load_all_ways(loader, {"w": (1,)}, STATE)


def test_rule_8_numpy_shares_memory_with_the_tensor() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                tensor.numpy()[0] = 77
                model.w.data.copy_(tensor)

    load_all_ways(loader, {"w": (8, 6)}, STATE)


def test_rule_8_shared_memory_is_refused() -> None:
    def loader(model: Any, weights: Any) -> None:
        for _, tensor in weights:
            tensor.share_memory_()

    with pytest.raises(NotImplementedError, match="mode=eager"):
        streamer.load(Model(loader, {"w": (1,)}), source_of(STATE))


@pytest.mark.parametrize("read", ["numpy", "tolist", "data_ptr", "__array__", "pickle", "dlpack"])
def test_rule_8_raw_reads_of_a_pending_parameter_find_its_values(read: str) -> None:
    def loader(model: Any, weights: Any) -> object:
        for name, tensor in weights:
            if name == "a":
                model.w.data.copy_(tensor)
                if read == "pickle":
                    return pickle.loads(pickle.dumps(model.w.data)).tolist()
                if read == "dlpack":
                    return torch.utils.dlpack.from_dlpack(model.w.data).tolist()
                if read == "data_ptr":
                    import ctypes

                    return list((ctypes.c_float * 48).from_address(model.w.data.data_ptr()))
                value = getattr(model.w.data, read)()
                return value if read == "tolist" else value.tolist()
        return None

    load_all_ways(loader, {"w": (8, 6)}, STATE)


def test_rule_8_a_lazy_as_data_of_a_parameter_becomes_real() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.w.data = tensor
            if name == "v":
                model.v.data = tensor[2:]

    model: Any = Model(loader, {"w": (8, 6), "v": (4,)})
    report = streamer.load(model, source_of(STATE))
    assert type(model.w.data) is torch.Tensor
    assert torch.equal(model.w, STATE["a"])
    assert torch.equal(model.v, STATE["v"][2:])
    assert set(report.loaded) == {"w", "v"}


def test_rule_9_a_layer_is_completed_in_one_read() -> None:
    source = source_of(STATE)
    shapes = {"p": tuple(STATE["a"].shape), "q": tuple(STATE["b"][2:4].shape), "r": tuple(STATE["c"].shape)}
    model: Any = Model(lambda m, w: None, shapes)
    calls = []
    from streamer.config import StreamConfig
    from streamer.fetch.engine import FetchEngine

    with FetchEngine(source, StreamConfig()) as engine:
        opened = engine.open_checkpoint()

        def fill(jobs: Any) -> None:
            calls.append(len(jobs))
            engine.fill(jobs, opened.items)

        tracer = Tracer(ModelStorages(model), fill)
        lazies: Any = {name: tracer.lazy(info) for name, info in opened.checkpoint.tensors.items()}
        with tracing(tracer):
            model.p.copy_(lazies["a"])
            model.q.copy_(lazies["b"][2:4])
            model.r.copy_(lazies["c"])
            tracer.copies.complete_touching(list(model.parameters()))
            assert calls == [3]
            assert torch.equal(model.p, STATE["a"])
            assert torch.equal(model.q, STATE["b"][2:4])
            assert torch.equal(model.r, STATE["c"])
        assert calls == [3]


def test_rule_10_lazies_are_fresh_and_take_attributes() -> None:
    def loader(model: Any, weights: Any) -> list[int]:
        ids = []
        for number, (_, tensor) in enumerate(weights):
            assert not hasattr(tensor, "shard_id")
            tensor.shard_id = number
            ids.append(tensor.shard_id)
        return ids

    load_all_ways(loader, {"w": (1,)}, STATE)


def test_factories_look_at_shapes_only() -> None:
    def loader(model: Any, weights: Any) -> list[float]:
        sums = []
        for _, tensor in weights:
            empty = torch.empty_like(tensor)
            empty.fill_(3)
            sums += [float(empty.sum()), float(torch.zeros_like(tensor).sum()), float(tensor.new_ones(2).sum())]
        return sums

    report = load_all_ways(loader, {"w": (1,)}, STATE)
    assert report.fetched_bytes == 0


def test_expand_in_a_copy_broadcasts_as_eager_does() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "v":
                model.w.data.copy_(tensor)
                model.x.data.copy_(tensor[3])

    report = load_all_ways(loader, {"w": (8, 6), "x": (5,)}, STATE)
    assert report.needed_bytes == 6 * 4 + 4


def test_shapes_that_do_not_broadcast_raise_where_eager_does() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                with pytest.raises(RuntimeError):
                    model.w.data.copy_(tensor)

    load_all_ways(loader, {"w": (3,)}, STATE)


def test_overlapping_elements_are_untangled() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "v":
                model.w.data.copy_(tensor.unfold(0, 3, 1))

    load_all_ways(loader, {"w": (4, 3)}, STATE)


def test_compiled_code_inside_load_weights() -> None:
    def loader(model: Any, weights: Any) -> None:
        compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
        for name, tensor in weights:
            if name == "a":
                model.w.data.copy_(tensor)
                model.x.data.copy_(compiled(model.w.data))

    load_all_ways(loader, {"w": (8, 6), "x": (8, 6)}, STATE)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.resize_(3),
        lambda tensor: tensor.set_(torch.zeros(1)),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.unsqueeze_(0),
        lambda tensor: tensor.squeeze_(),
        lambda tensor: tensor.swapdims_(0, 1),
        lambda tensor: tensor.add_(1).transpose_(0, 1),
    ],
    ids=["resize_", "set_", "t_", "unsqueeze_", "squeeze_", "swapdims_", "transpose_ of its own"],
)
def test_changes_of_a_checkpoint_tensors_own_shape_are_refused(change: Callable[[torch.Tensor], object]) -> None:
    """The tensor would keep its shape, and the copy that follows take the wrong elements."""

    def loader(model: torch.nn.Module, weights: Weights) -> None:
        for _, tensor in weights:
            change(tensor)

    model = Model(loader, {"w": (2, 3)})
    with pytest.raises(LoadError, match="_ on checkpoint tensor w.*mode=eager"):
        streamer.load(model, source_of({"w": torch.ones(2, 3)}), {"strict": False})


def test_detaching_in_place_changes_nothing() -> None:
    def loader(model: torch.nn.Module, weights: Weights) -> None:
        for name, tensor in weights:
            getattr(model, name).copy_(tensor.detach_())

    model = Model(loader, {"w": (2, 3)})
    report = streamer.load(model, source_of({"w": torch.arange(6.0).reshape(2, 3)}))
    assert torch.equal(model.state_dict()["w"], torch.arange(6.0).reshape(2, 3))
    assert report.materialised == ()


def test_errors_of_the_model_code_pass_and_release_everything() -> None:
    import threading

    def loader(model: Any, weights: Any) -> None:
        for number, (_, tensor) in enumerate(weights):
            model.w.data.copy_(tensor[0])
            if number == 2:
                raise KeyError("layer 7 is unknown")

    before = threading.active_count()
    with pytest.raises(KeyError, match="layer 7 is unknown"):
        streamer.load(Model(loader, {"w": (6,)}), source_of({name: STATE[name] for name in "abcd"}))
    assert threading.active_count() == before
    torch.empty(2).fill_(1)  # no mode is left behind


def test_unloaded_parameters_are_named_with_what_is_near() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.a.data.copy_(tensor)

    with pytest.raises(
        MissingParametersError, match="no values for 2 parameters: bb .nearest in the checkpoint: b"
    ) as caught:
        streamer.load(Model(loader, {"a": (8, 6), "bb": (3,), "cc": (2,)}), source_of(STATE))
    assert caught.value.names == ("bb", "cc")


def test_parameters_in_one_storage_are_told_apart() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "v":
                model.left.data.copy_(tensor)

    model = Model(loader, {})
    flat = torch.zeros(12)
    model.left = torch.nn.Parameter(flat[:6], requires_grad=False)
    model.right = torch.nn.Parameter(flat[6:], requires_grad=False)
    with pytest.raises(MissingParametersError) as caught:
        streamer.load(model, source_of(STATE))
    assert caught.value.names == ("right",)


def test_loading_stops_early() -> None:
    def loader(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            if name == "a":
                model.w.data.copy_(tensor)
                return

    report = load_all_ways(loader, {"w": (8, 6)}, STATE)
    assert set(report.ignored.values()) == {"the model stopped reading before it"}


def test_a_model_that_is_no_module() -> None:
    class Plain:
        def __init__(self) -> None:
            self.total = 0.0

        def load_weights(self, weights: Any) -> None:
            for _, tensor in weights:
                self.total += float(tensor.sum())

    model = Plain()
    streamer.load(model, source_of(STATE))
    assert model.total == sum(float(tensor.sum()) for tensor in STATE.values())
    with pytest.raises(LoadError, match="no torch.nn.Module"):
        streamer.load(object(), source_of(STATE))


def test_memory_that_is_used_again_does_not_count_as_written() -> None:
    """A parameter may lie where a freed temporary lay; what was written to that is not the parameter's."""
    from streamer.trace.pending import storage_key
    from streamer.trace.writes import WriteLog

    log = WriteLog()
    keys = set()
    for _ in range(50):
        temporary = torch.zeros(8)
        log.note(temporary)
        keys.add(storage_key(temporary))
        del temporary
        parameter = torch.zeros(8)
        assert storage_key(parameter) not in keys
        assert not log.reached(parameter)
