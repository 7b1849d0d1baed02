"""When a plan is kept, when it is used, and what it says."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import streamer
from streamer.plan_cache.cache import Circumstances
from streamer.report import PlanCacheUse
from streamer.session import LoadSession
from tests.plan_cache.models import KEPT, STATE, USED, Columns, load
from tests.trace.loading import source_of


@pytest.fixture(autouse=True)
def _no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Columns, "runs", 0)


def assert_loaded(model: Any, state: dict[str, torch.Tensor] = STATE) -> None:
    start = 4 * model.rank
    assert torch.equal(model.column[:4], state["column"][start : start + 4])
    assert not model.column[4:].any()
    assert torch.equal(model.norm, state["norm"])


def test_the_second_load_runs_none_of_the_models_code(tmp_path: Path) -> None:
    first, again = Columns(), Columns()
    kept = load(tmp_path, first)
    used = load(tmp_path, again, verify=True)
    assert (kept.plan_cache, used.plan_cache) == (KEPT, USED)
    assert Columns.runs == 1
    assert_loaded(first)
    assert_loaded(again)
    assert used.verified is not None
    assert used.verified.copies == 2
    for field in ("expected", "loaded", "ignored", "copies", "casts", "needed_bytes", "checkpoint_bytes"):
        assert getattr(used, field) == getattr(kept, field), field
    assert used.ignored == {"ignored": "the model looked at it and took nothing"}
    assert used.summary().count("plan used") == 1


def test_without_the_option_there_are_no_files(tmp_path: Path) -> None:
    report = load(tmp_path, Columns(), plan_cache=False)
    assert report.plan_cache is None
    assert not list(tmp_path.iterdir())


def test_other_values_under_the_same_headers_are_loaded(tmp_path: Path) -> None:
    """A fine-tuned revision of a checkpoint."""
    load(tmp_path, Columns())
    tuned = {name: tensor * 2 + 1 for name, tensor in STATE.items()}
    model = Columns()
    assert load(tmp_path, model, tuned).plan_cache == USED
    assert_loaded(model, tuned)


class Renamed(Columns):
    """Another class with the same code."""


CHANGES: dict[str, Callable[[], tuple[Any, dict[str, torch.Tensor]]]] = {
    "rank": lambda: (Columns(rank=0), STATE),
    "shape of a parameter": lambda: (Columns(rows=6), STATE),
    "class": lambda: (Renamed(), STATE),
    "dtype in the header": lambda: (Columns(), {**STATE, "norm": STATE["norm"].double()}),
    "shape in the header": lambda: (Columns(), {**STATE, "ignored": torch.arange(5.0)}),
    "name in the header": lambda: (Columns(), {**STATE, "more": torch.arange(4.0)}),
    "device or dtype of a parameter": lambda: (Columns().to(torch.float64), STATE),
    "table": lambda: (_with(Columns(), "places", torch.tensor([0, 1])), STATE),
    "attribute": lambda: (_with(Columns(), "scheme", "interleaved"), STATE),
    "attribute of an attribute": lambda: (_with(Columns(), "config", SimpleNamespace(heads=[4, 2])), STATE),
    "attribute far inside": lambda: (
        _with(Columns(), "config", {"a": [SimpleNamespace(b={"c": (1, {"d": 3})})]}),
        STATE,
    ),
    "sparse tensor": lambda: (_with(Columns(), "mask", torch.eye(3).to_sparse()), STATE),
    "pattern": lambda: (_with(Columns(), "mapper", {re.compile("a"): 1}), STATE),
    "slot": lambda: (_with(Columns(), "config", Slotted(3)), STATE),
    "what a method is bound to": lambda: (_with(Columns(), "config", Slotted(4).load), STATE),
    "attribute of a parameter": lambda: (_marked(Columns()), STATE),
    "argument of a function": lambda: (_with(Columns(), "shard", _shard(1)), STATE),
    "parameters that are one": lambda: (_tied(Columns()), STATE),
}


def _with(model: Columns, name: str, value: object) -> Columns:
    setattr(model, name, value)
    return model


def _nested(value: int) -> object:
    return {"a": [SimpleNamespace(b={"c": (1, {"d": value})})]}


@dataclass(slots=True)
class Slotted:
    heads: int

    def load(self) -> None: ...


def _shard(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.chunk(2, dim)[0]


def _marked(model: Columns) -> Columns:
    model.norm.output_dim = 1  # type: ignore[attr-defined]
    return model


def _tied(model: Columns) -> Columns:
    model.other = model.norm
    return model


#: The same but for what is changed.
NEARLY: dict[str, list[tuple[str, Any]]] = {
    "attribute of an attribute": [("config", SimpleNamespace(heads=[4, 3]))],
    "attribute far inside": [("config", _nested(2))],
    "sparse tensor": [("mask", torch.eye(4).to_sparse())],
    "pattern": [("mapper", {re.compile("b"): 1}), ("mapper", {re.compile("a", re.I): 1})],
    "slot": [("config", Slotted(2))],
    "what a method is bound to": [("config", Slotted(5).load)],
    "argument of a function": [("shard", _shard(0))],
}


@pytest.mark.parametrize("what", CHANGES)
def test_anything_that_loading_code_may_go_by_is_another_plan(tmp_path: Path, what: str) -> None:
    load(tmp_path, Columns())
    for name, nearly in NEARLY.get(what, ()):
        load(tmp_path, _with(Columns(), name, nearly))
    before = len(list((tmp_path / "plans").iterdir()))
    model, state = CHANGES[what]()
    assert load(tmp_path, model, state).plan_cache == KEPT
    assert_loaded(model, state)
    assert len(list((tmp_path / "plans").iterdir())) == before + 1


def test_another_default_dtype_is_another_plan(tmp_path: Path) -> None:
    load(tmp_path, Columns())
    torch.set_default_dtype(torch.float64)
    try:
        assert load(tmp_path, Columns().float()).plan_cache == KEPT
    finally:
        torch.set_default_dtype(torch.float32)
    assert load(tmp_path, Columns()).plan_cache == USED


@pytest.mark.parametrize("fact", ["engine", "config", "tp"])
def test_anything_that_the_engine_tells_is_another_plan(tmp_path: Path, fact: str) -> None:
    def use(**facts: str) -> PlanCacheUse | None:
        config = streamer.StreamConfig(plan_cache=True, cache_dir=str(tmp_path))
        model = Columns()
        circumstances = Circumstances({"engine": "e 1.0", "config": "c", "tp": "1 of 2", **facts})
        with LoadSession(model, config, circumstances=circumstances) as session:
            opened = session.open(source_of(STATE))
            assert session.run(model.load_weights, session.weights(opened)) == {"column", "norm"}
            return session.report().plan_cache

    assert use() == KEPT
    assert use() == USED
    assert use(**{fact: "another"}) == KEPT
    assert use() == USED


def test_code_that_changed_is_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model, of a function that it was given, and of a base class."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    files = {
        "s3s_base.py": "import torch\nclass Base(torch.nn.Module):\n    pass\n",
        "s3s_loader.py": "def copy(parameter, tensor):\n    parameter.data.copy_(tensor)\n",
        "s3s_model.py": (
            "import torch, s3s_base, s3s_loader\nclass Model(s3s_base.Base):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.norm = torch.nn.Parameter(torch.zeros(6))\n"
            "        self.norm.weight_loader = s3s_loader.copy\n"
            "    def load_weights(self, weights):\n"
            "        for name, tensor in weights:\n"
            "            if name == 'norm':\n                self.norm.weight_loader(self.norm, tensor)\n"
        ),
    }

    def use() -> PlanCacheUse | None:
        for name in files:
            sys.modules.pop(name.removesuffix(".py"), None)
        importlib.invalidate_caches()
        return load(tmp_path / "cache", importlib.import_module("s3s_model").Model()).plan_cache

    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert use() == KEPT
    assert use() == USED
    for name, text in files.items():
        (tmp_path / name).write_text(text + "# changed\n")
        assert use() == KEPT, name
        assert use() == USED, name


def test_functions_without_a_file_are_told_apart_by_what_they_do(tmp_path: Path) -> None:
    """Such as those of a notebook: also by their constants, and by functions inside them."""

    def use(text: str) -> PlanCacheUse | None:
        return load(tmp_path, _with(Columns(), "shard", eval(text))).plan_cache

    texts = ["lambda t: t[0:4]", "lambda t: t[0:5]", "lambda t: t.t()", "lambda t: (lambda u: u[1:])(t)"]
    texts += ["lambda t: (lambda u: u[2:])(t)", "lambda t: t in {1, 2}", "lambda t: t in {1, 3}"]
    assert [use(text) for text in texts] == [KEPT] * len(texts)
    assert [use(text) for text in texts] == [USED] * len(texts)


def test_a_class_without_a_file_has_no_plan(tmp_path: Path) -> None:
    """Its methods may be others in the next cell."""
    for method in ("", "@classmethod", "@staticmethod", "@property"):
        made: dict[str, Any] = {"Columns": Columns, "__name__": "__notebook__"}
        exec(f"class Typed(Columns):\n    {method}\n    def method(*_): ...\n", made)
        use = load(tmp_path, made["Typed"]()).plan_cache
        assert use == PlanCacheUse("not used", "class Typed of __notebook__ is in no file")
    assert not (tmp_path / "plans").exists()


def test_classes_of_extensions_may_be_in_no_file(tmp_path: Path) -> None:
    made = [_with(Columns(), "lock", threading.Lock()) for _ in range(2)]
    assert [load(tmp_path, model).plan_cache for model in made] == [KEPT, USED]


def test_another_process_finds_the_same_digest() -> None:
    """Whatever order its sets are in."""
    program = (
        "from streamer.plan_cache.description import digest_of_code\n"
        'made = {eval(f\'lambda t: t in {{{n}, "a", "b", "c"}}\').__code__ for n in range(20)}\n'
        "print(digest_of_code(made))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(said) == 1


# -- what a plan says beside copies ------------------------------------------------------------------------------


def _sets_attributes(model: Any) -> None:
    model.is_ready = True
    model.places_of = {"a": [1, (2, 3)], "b": set()}
    model.scale = 0.1
    model.eval()


@pytest.mark.parametrize("value", [7, 2.5, True, math.nan, -math.inf, 2**40])
def test_numbers_that_parts_are_filled_with(tmp_path: Path, value: float) -> None:
    models = [Columns(then=lambda model: [model.norm.data[2:4].fill_(value), "norm"][1:]) for _ in range(2)]
    assert [load(tmp_path, model).plan_cache for model in models] == [KEPT, USED]
    expected = STATE["norm"].clone()
    expected[2:4] = value
    for model in models:
        assert torch.equal(model.norm.view(torch.int32), expected.view(torch.int32))


def test_plain_attributes_are_set_again(tmp_path: Path) -> None:
    models: list[Any] = [Columns(then=_sets_attributes) for _ in range(2)]
    assert [load(tmp_path, model).plan_cache for model in models] == [KEPT, USED]
    for model in models:
        assert model.is_ready is True
        assert model.places_of == {"a": [1, (2, 3)], "b": set()}
        assert model.scale == 0.1
        assert not model.training
    assert models[0].places_of is not models[1].places_of


@pytest.mark.parametrize("returned", [None, {"norm"}, frozenset({"norm"}), ["norm", "column"], ("norm",), set()])
def test_what_load_weights_returned_is_returned(tmp_path: Path, returned: Any) -> None:
    config = streamer.StreamConfig(plan_cache=True, cache_dir=str(tmp_path))
    for outcome in (KEPT, USED):
        model = Columns(then=lambda model: returned)
        with LoadSession(model, config, circumstances=Circumstances({})) as session:
            opened = session.open(source_of(STATE))
            result = session.run(model.load_weights, session.weights(opened))
            assert session.report().plan_cache == outcome
        assert result == returned
        assert type(result) is type(returned)


def test_tables_may_be_looked_at(tmp_path: Path) -> None:
    """The map of global experts to a rank's own is one."""
    models = [Columns(then=lambda model: ["norm"] * int(model.places[0])) for _ in range(2)]
    assert [load(tmp_path, model).plan_cache for model in models] == [KEPT, USED]


def test_code_that_stops_early_and_code_that_goes_on_after_the_end(tmp_path: Path) -> None:
    class Stops(Columns):
        def load_weights(self, weights: Any) -> None:
            name, tensor = next(weights)
            assert name == "column"
            self.column.data[:4].copy_(tensor[:4])

    class GoesOn(Columns):
        def load_weights(self, weights: Any) -> None:
            taken = dict(weights)
            self.column.data[1:].copy_(taken["column"][:4])
            self.column.data[:4].copy_(taken["column"][4:])

    for kind in (Stops, GoesOn):
        models = [kind(), kind()]
        assert [load(tmp_path, model, overlap_tensors=1).plan_cache for model in models] == [KEPT, USED]
        assert torch.equal(models[0].column, models[1].column)
        assert (models[0].column[0] == STATE["column"][0 if kind is Stops else 4]).all()


# -- what no plan is kept of ---------------------------------------------------------------------------------------


class OddSet(set[str]):
    """Not what it looks like."""


def _grows(model: Any) -> None:
    model.more = torch.nn.Parameter(torch.zeros(1))


REFUSALS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a parameter's values": (lambda model: bool(model.norm.sum() > 0) and None, "looks at values of the model by"),
    "values that are no table": (lambda model: [float(model.table[0])][1:], "looks at values of the model by"),
    "a parameter's values past torch": (lambda model: model.norm.data.numpy().tolist() and None, "by numpy"),
    "a parameter's address": (lambda model: [model.norm.data_ptr()][1:], "by data_ptr"),
    "values of its own": (
        lambda model: model.norm.data.copy_(torch.ones(6)) is None,
        "writes to the model by aten::copy_",
    ),
    "values changed in place": (lambda model: model.norm.data.add_(1) is None, "writes to the model by aten::add_"),
    "tables that it writes": (
        lambda model: [model.places.fill_(1), int(model.places[0])][2:],
        "looks at values of the model by",
    ),
    "other memory": (lambda model: setattr(model.norm, "data", torch.zeros(6)), "changes a tensor otherwise: .norm"),
    "more parameters": (_grows, "changes ."),
    "a parameter replaced": (
        lambda model: setattr(model, "norm", torch.nn.Parameter(torch.zeros(6), requires_grad=False)),
        "otherwise: .norm",
    ),
    "a list changed in place": (lambda model: model.places_list.append(1), "changes .places_list of the model"),
    "an object's attribute": (lambda model: setattr(model.config, "heads", 3), "changes .config of the model"),
    "an object as attribute": (lambda model: setattr(model, "more", object()), "changes .more of the model"),
    "a tensor as attribute": (lambda model: setattr(model, "more", torch.zeros(1)), "changes .more of the model"),
    "a tensor in an attribute": (lambda model: model.table.add_(1) is None, "writes to the model by aten::add_"),
    "a gradient": (lambda model: [model.norm.requires_grad_()][1:], "changes .norm of the model"),
    "a hook": (
        lambda model: [model.register_forward_hook(lambda *_: None)][1:],
        "changes ._forward_hooks of the model",
    ),
    "an attribute less": (lambda model: delattr(model, "config"), "changes .config of the model"),
    "an attribute's tensor that it fills": (
        lambda model: [model.table.fill_(1)][1:],
        "changes a tensor otherwise: .table",
    ),
    "no names": (lambda model: {"norm": 1}, "returned something else than names: dict"),
    "odd names": (lambda model: OddSet(["norm"]), "returned something else than names: OddSet"),
    "numbers for names": (lambda model: [1], "returned something else than names: list"),
    "a mark on a parameter": (lambda model: setattr(model.norm, "is_done", True), "changes .norm of the model"),
}


def new_model(then: Callable[[Any], object]) -> Columns:
    model = Columns(then=then)
    for name, value in (("places_list", []), ("config", SimpleNamespace(heads=2)), ("table", torch.zeros(3))):
        setattr(model, name, value)
    return model


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_said_is_not_kept(tmp_path: Path, what: str) -> None:
    then, why = REFUSALS[what]
    for _ in range(2):
        use = load(tmp_path, new_model(then)).plan_cache
        assert use is not None
        assert use.outcome == "not used"
        assert why in use.why
    assert Columns.runs == 2
    assert not (tmp_path / "plans").exists()


class LooksAtValues(Columns):
    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "norm" and tensor[0] > 0:
                self.norm.data.copy_(tensor)


class ComputesWithATensor(Columns):
    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor * torch.ones(6))


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (LooksAtValues, {}, "looks at values of the checkpoint: "),
        (ComputesWithATensor, {}, "computes aten::mul(norm) with an argument of type Tensor"),
        (Columns, {"mode": "eager"}, "mode=eager traces nothing"),
        (
            lambda: torch.nn.ParameterDict({"norm": torch.nn.Parameter(torch.zeros(6))}),
            {},
            "this way of loading has none",
        ),
        (lambda: SimpleNamespace(load_weights=lambda weights: list(weights)[:0]), {}, "is no torch.nn.Module"),
        (lambda: Columns().to("meta"), {}, "gets memory while it is loaded"),
    ],
)
def test_loads_that_have_no_plan(tmp_path: Path, model: Callable[[], Any], options: dict[str, Any], why: str) -> None:
    use = load(tmp_path, model(), **options).plan_cache
    assert use is not None
    assert use.outcome == "not used"
    assert why in use.why
    assert not (tmp_path / "plans").exists()


def test_several_checkpoints_have_no_plan(tmp_path: Path) -> None:
    config = streamer.StreamConfig(plan_cache=True, cache_dir=str(tmp_path))
    model = Columns()
    with LoadSession(model, config, circumstances=Circumstances({})) as session:

        def both() -> Iterator[tuple[str, torch.Tensor]]:
            yield from session.weights(session.open(source_of(STATE)))
            yield from session.weights(session.open(source_of({"norm": STATE["norm"]})))

        session.run(model.load_weights, both())
        assert session.report().plan_cache == PlanCacheUse("not used", "it was loaded from 2 checkpoints")


def test_opaque_objects_are_named_only(tmp_path: Path) -> None:
    """Such as settings with an address that changes with every start."""
    config = streamer.StreamConfig(plan_cache=True, cache_dir=str(tmp_path))
    circumstances = Circumstances({}, lambda kind: kind is SimpleNamespace)
    uses = []
    for port in (1, 2):
        model = Columns()
        model.settings = SimpleNamespace(port=port)  # type: ignore[assignment]
        with LoadSession(model, config, circumstances=circumstances) as session:
            session.run(model.load_weights, session.weights(session.open(source_of(STATE))))
            uses.append(session.report().plan_cache)
    assert uses == [KEPT, USED]


def test_neither_way_keeps_the_model_alive(tmp_path: Path) -> None:
    for outcome in (KEPT, USED):
        model = Columns()
        gone = weakref.ref(model)
        assert load(tmp_path, model).plan_cache == outcome
        del model
        gc.collect()
        assert gone() is None


def test_a_failed_load_keeps_nothing(tmp_path: Path) -> None:
    def fails(model: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load(tmp_path, Columns(then=fails))
    assert not (tmp_path / "plans").exists()


def test_the_report_says_it_in_json(tmp_path: Path) -> None:
    report = load(tmp_path, Columns())
    assert json.loads(json.dumps(report.to_dict()))["plan_cache"] == {"outcome": "kept", "why": ""}
