"""Live updates by SGLang's own code, in this process: the new weights bit for bit, or the old ones."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors.torch
import torch
from torch import nn

from sglang_s3stream.committed import Committed, committed_of
from sglang_s3stream.update import Update
from streamer.errors import AccessDeniedError, LoadError, RollbackError, StreamError
from streamer.share.messages import Message, with_rank
from tests.servers.object_server import Fault, ObjectServer, Request, Response, error_response
from tests.sglang.cases import CASES, Case
from tests.sglang.host import Loaded, load, served
from tests.tensors import differences, tensors_of

Get = Callable[[str], tuple[Case, Path]]
Tensors = dict[str, torch.Tensor]
T = TypeVar("T")

pytestmark = pytest.mark.usefixtures("registered")

SECOND = "model-00002-of-00002.safetensors"
#: Of files as small as these, the default for headers would take most.
OPTIONS = {"header_read_bytes": 4096}


def other_values(tensors: Tensors) -> Tensors:
    return {n: (t.float() * -0.75 + 0.01).to(t.dtype) if t.is_floating_point() else t for n, t in tensors.items()}


def remade(folder: Path, to: Path, change: Callable[[Tensors], Tensors] = other_values) -> Path:
    """Write another version of a checkpoint."""
    shutil.copytree(folder, to)
    for path in to.glob("*.safetensors"):
        safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path, metadata={"format": "pt"})
    return to


def values_of(loaded: Loaded) -> Tensors:
    """Return what `loaded` holds now, which it may overwrite."""
    return {name: tensor.detach().clone() for name, tensor in tensors_of(loaded.model).items()}


@dataclasses.dataclass
class Store:
    """A server with versions of a model, and the same on disk."""

    server: ObjectServer
    folder: Path
    scratch: Path

    def put(self, name: str, change: Callable[[Tensors], Tensors] | None = other_values) -> str:
        """Make a version available; return its URL."""
        folder = self.folder if change is None else remade(self.folder, self.scratch / name, change)
        self.server.put_folder("models", f"{name}/", folder)
        return f"s3://models/{name}"

    def fail_bodies(self, name: str, *, then: Callable[[], None] = lambda: None, times: int | None = 1) -> Fault:
        """Refuse to give any more of the second file of a version than its header."""

        def refuse(request: Request, _: Response) -> Response | None:
            if request.headers.get("range", "").startswith("bytes=0-"):
                fault.times = times  # it was not this request's
                return None
            then()
            return error_response(403, "AccessDenied", "no")

        fault = Fault(refuse, key=f"{name}/{SECOND}", times=times)
        self.server.faults.append(fault)
        return fault


@pytest.fixture
def store(checkpoint: Get, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return Store(server, checkpoint("llama")[1], tmp_path)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that gives what the plugin has logged."""
    caplog.set_level("INFO", logger="sglang.s3stream")  # other tests may have silenced SGLang's
    return lambda: [record.getMessage() for record in caplog.records if record.name == "sglang.s3stream"]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the ways back."""
    found: list[int] = []
    original = Update.turn_back

    def turn_back(self: Update) -> None:
        found.append(1)
        original(self)

    monkeypatch.setattr(Update, "turn_back", turn_back)
    return found


@contextmanager
def unchanged(loaded: Loaded) -> Iterator[None]:
    """See that all that is served stays as it was, and what SGLang and we know of it."""
    before, path, committed = values_of(loaded), loaded.config.model_path, committed_of(loaded.config)
    assert committed is not None
    yield
    assert differences(before, values_of(loaded)) == []
    assert loaded.config.model_path == path
    assert committed_of(loaded.config) is committed


# -- what is good ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_weights_are_those_of_a_fresh_load_by_the_default_loader(checkpoint: Get, tmp_path: Path, name: str) -> None:
    case, first = checkpoint(name)
    second = remade(first, tmp_path / "second")
    for mode in ("trace", "eager"):
        with served(first, extra={"mode": mode, "verify": mode == "trace"}, **case.arguments) as loaded:
            before = values_of(loaded)
            assert loaded.update(str(second)) == (True, "Succeeded to update model weights.")
            expected = tensors_of(load_beside(second, case))
            assert differences(expected, tensors_of(loaded.model)) == []
            assert differences(before, values_of(loaded))
        with served(second, extra={"mode": mode}, **case.arguments) as loaded:
            assert loaded.update(str(first))[0]
            assert loaded.update(str(second))[0]
            assert differences(expected, tensors_of(loaded.model)) == []


def load_beside(folder: Path, case: Case) -> nn.Module:
    """Load by SGLang's default loader, whose process is pretended; what was pretended before is over then."""
    return load(folder, load_format="auto", **case.arguments).model


def test_only_a_ranks_bytes_are_fetched_with_the_options_of_the_first_load(
    store: Store, logged: Callable[[], list[str]]
) -> None:
    options = {**OPTIONS, "coalesce_gap_bytes": 0, "metrics_file": str(store.scratch / "{model}-{rank}.prom")}
    with served(store.put("v1", None), extra=options) as loaded:
        url = store.put("v2")
        reads = len(store.server.counters.ranges)
        assert loaded.update(url)[0]
        size = sum(path.stat().st_size for path in store.folder.glob("*.safetensors"))
        read = sum(end - start for key, start, end in store.server.counters.ranges[reads:] if "v2/" in key)
        assert read < 0.8 * size
        assert loaded.config.model_path == url
        committed = committed_of(loaded.config)
        assert committed is not None
        assert committed.revision.url.rstrip("/") == url
        assert committed.options.coalesce_gap_bytes == 0
    assert 's3stream_load_success{url="s3://models/v2/",rank="0"} 1.0' in (store.scratch / "v2-0.prom").read_text()
    assert [text for text in logged() if text.startswith("s3stream: updated to s3://models/v2/, ")]


def test_settings_that_differ_are_named(store: Store, logged: Callable[[], list[str]]) -> None:
    first = store.put("v1", None)
    second = store.put("v2")
    config = (store.folder / "config.json").read_text()
    assert '"rms_norm_eps"' in config
    store.server.put("models", "v2/config.json", config.replace('"rms_norm_eps"', '"other_eps"').encode())
    with served(first, extra=OPTIONS) as loaded:
        assert loaded.update(second)[0]
    assert [text for text in logged() if "differs" in text and "other_eps, rms_norm_eps" in text]


# -- what is refused before anything is overwritten ------------------------------------------------------------


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def cut(tensors: Tensors) -> Tensors:
    return {n: t[:-1].contiguous() if n.endswith("layers.1.mlp.up_proj.weight") else t for n, t in tensors.items()}


def of_another_dtype(tensors: Tensors) -> Tensors:
    return {n: t.to(torch.float16) if n == "model.norm.weight" else t for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.norm.weight"), "model.norm.weight"),
        (cut, r"layers\.1\.mlp\.up_proj\.weight \(BF16 \[127, 64\], not BF16 \[128, 64\]\)"),
        (of_another_dtype, r"model\.norm\.weight \(F16 \[64\], not BF16 \[64\]\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    store: Store, turns: list[int], change: Callable[[Tensors], Tensors], message: str
) -> None:
    with served(store.put("v1", None), extra=OPTIONS) as loaded:
        bad = store.put("v2", change)
        with unchanged(loaded):
            assert_fails(loaded.update(bad), message)
            assert_fails(loaded.update("s3://models/nothing"), "s3://models/nothing")
        assert not turns
        assert loaded.update(store.put("v3"))[0]


def assert_fails(outcome: tuple[bool, str], *messages: str) -> None:
    success, text = outcome
    assert not success
    for message in messages:
        assert re.search(message, text), text


def test_there_must_be_a_way_back(store: Store, turns: list[int]) -> None:
    with served(store.put("v1", None), extra=OPTIONS) as loaded:
        url = store.put("v2")
        store.server.put_folder("models", "v1/", store.scratch / "v2")
        with unchanged(loaded):
            assert_fails(loaded.update(url), "no way back to what is served now: the object changed", "URL of its own")
        assert not turns


def test_a_bucket_with_versions_has_a_way_back_to_what_was_replaced(store: Store, turns: list[int]) -> None:
    store.server.is_versioned = True
    with served(store.put("v1", None), extra={**OPTIONS, "pin": "version"}) as loaded:
        store.server.put_folder("models", "v1/", remade(store.folder, store.scratch / "next"))
        store.fail_bodies("v1")
        with unchanged(loaded):
            assert_fails(loaded.update("s3://models/v1"), "AccessDenied")
        assert len(turns) == 1
        assert loaded.update("s3://models/v1")[0]
        # Beside what is pretended here, so at the end.
        assert differences(tensors_of(load(store.scratch / "next").model), tensors_of(loaded.model)) == []


def test_weights_of_another_load_format_cannot_be_returned_to(store: Store) -> None:
    url = store.put("v2")
    with served(store.folder, load_format="auto") as loaded:
        assert_fails(loaded.update(url), "loaded with another", "--load-format s3stream")
    with served(store.put("v1", None), extra=OPTIONS) as loaded:
        assert loaded.update(str(store.scratch / "v2"), "auto")[0]
        assert_fails(loaded.update(url), "replaced by .*/v2 with load format auto")


def test_stages_are_not_updated_one_after_the_other(store: Store) -> None:
    with served(store.put("v1", None), extra=OPTIONS, tp_size=1, pp_size=2) as loaded, unchanged(loaded):
        assert_fails(loaded.update(store.put("v2")), "with --pp-size 2 the weights cannot be updated")


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        ("enable-multi-layer-eagle", {"enable_multi_layer_eagle": True}),
        ("elastic-ep-backend", {"elastic_ep_backend": "mooncake"}),
        (
            "speculative-draft-load-format auto",
            {"speculative_algorithm": "EAGLE", "speculative_draft_load_format": "auto"},
        ),
    ],
)
def test_other_situations_that_are_refused(
    store: Store, other: OtherRank, option: str, settings: dict[str, Any]
) -> None:
    from sglang.srt.runtime_context import get_context

    with served(store.put("v1", None), extra={**OPTIONS, "share": "off"}) as loaded:
        get_context().override("test", **settings)
        with unchanged(loaded):
            assert_fails(loaded.update(store.put("v2")), f"with --{option} the weights cannot be updated")
        if "elastic" in option:  # a rank that misses experts reloads them, whether others are there or not
            other.purposes.clear()
            assert loaded.update(loaded.config.model_path)[0]
            assert other.purposes == []


def test_what_sglang_has_repacked_for_good_is_not_loaded_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    def repack(_: Any, layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)

    url = store.put("v1", None)
    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", repack)
    with served(url, extra=OPTIONS) as loaded, unchanged(loaded):
        assert_fails(loaded.update(store.put("v2")), "nothing can be loaded into them again: .*down_proj.weight")


# -- what fails half-way ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_a_file_that_cannot_be_read_brings_the_old_weights_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[str]], mode: str
) -> None:
    overwritten: list[str] = []
    original = Update.turn_back
    options = {**OPTIONS, "mode": mode, "metrics_file": str(store.scratch / "{model}.prom")}
    with served(store.put("v1", None), extra=options) as loaded:
        before = values_of(loaded)

        def turn_back(self: Update) -> None:
            overwritten.extend(differences(before, values_of(loaded)))
            original(self)

        monkeypatch.setattr(Update, "turn_back", turn_back)
        url = store.put("v2")
        store.fail_bodies("v2")
        with unchanged(loaded):
            assert_fails(
                loaded.update(url),
                "the update to s3://models/v2 failed, and all ranks go back to serving s3://models/v1/: ",
                rf"s3://models/v2/{SECOND} bytes \d+-\d+: ",
                "status 403",
            )
        if mode == "eager":
            assert overwritten
        assert 's3stream_load_success{url="s3://models/v2/",rank="0"} 0.0' in (store.scratch / "v2.prom").read_text()
        assert [text for text in logged() if "s3://models/v1/ is served again" in text]
        assert loaded.update(url)[0]
        assert differences(tensors_of(load(store.scratch / "v2").model), tensors_of(loaded.model)) == []


def test_parameters_that_keep_old_values_are_a_failure(
    store: Store, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(store.put("v1", None), extra=OPTIONS) as loaded:
        kind: Any = type(loaded.model)
        original = kind.load_weights

        def load_weights(self: Any, weights: Any) -> Any:
            left_out = "model.norm.weight" if not turns else ""
            return original(self, ((name, tensor) for name, tensor in weights if name != left_out))

        monkeypatch.setattr(kind, "load_weights", load_weights)
        with unchanged(loaded):
            assert_fails(loaded.update(store.put("v2")), "no new values for 1 parameters: model.norm.weight")
        assert len(turns) == 1


def test_an_error_without_a_text_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(store.put("v1", None), extra=OPTIONS) as loaded:
        kind: Any = type(loaded.model)
        original, fails = kind.load_weights, iter([True])

        def load_weights(self: Any, weights: Any) -> Any:
            original(self, weights)
            if next(fails, False):
                raise AssertionError

        monkeypatch.setattr(kind, "load_weights", load_weights)
        with unchanged(loaded):
            assert_fails(loaded.update(store.put("v2")), "serving s3://models/v1/: AssertionError")


def test_an_update_that_cannot_be_undone_ends_the_engine(store: Store) -> None:
    with served(store.put("v1", None), extra=OPTIONS) as loaded:
        url = store.put("v2")

        def lose() -> None:
            del store.server.objects["models"][f"v1/{SECOND}"]

        store.fail_bodies("v2", then=lose)
        with pytest.raises(RollbackError) as raised:
            loaded.update(url)
    message = str(raised.value)
    assert f"the update to s3://models/v2 failed (s3://models/v2/{SECOND} bytes " in message
    assert "s3://models/v1/ could not be loaded again" in message
    assert f"s3://models/v1/{SECOND}" in message.partition("could not be loaded again")[2]


# -- a part of what is served ----------------------------------------------------------------------------------


def is_expert(name: str) -> bool:
    return ".experts.2." in name


def test_missing_experts_are_reloaded_and_nothing_else(checkpoint: Get, tmp_path: Path) -> None:
    case, folder = checkpoint("qwen3_moe")
    with served(folder, rank=0, **case.arguments) as loaded:
        before, committed = values_of(loaded), committed_of(loaded.config)
        experts = [name for name in before if name.endswith(("experts.w13_weight", "experts.w2_weight"))]
        assert experts
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                parameter[2 if name in experts else ...] = 7.0
        assert loaded.update(str(folder), weight_name_filter=is_expert)[0]
        now = tensors_of(loaded.model)
        for name in experts:
            assert torch.equal(now[name], before[name])
        assert (now["lm_head.weight"] == 7.0).all()
        assert committed is not None
        assert committed_of(loaded.config) == committed


def test_a_part_of_other_weights_is_not_loaded(checkpoint: Get, tmp_path: Path, turns: list[int]) -> None:
    case, folder = checkpoint("qwen3_moe")
    other = remade(folder, tmp_path / "other")
    with served(folder, rank=0, **case.arguments) as loaded, unchanged(loaded):
        assert_fails(loaded.update(str(other), weight_name_filter=is_expert), "no new values for .*lm_head.weight")
    assert len(turns) == 1


# -- draft models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_draft_model_with_a_checkpoint_of_its_own_keeps_its_weights(
    checkpoint: Get, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SGLang undoes its repacking of layers before it loads, they are loaded again, and nobody else's memory."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    undone: list[Any] = []

    def undo(_: Any, layer: Any) -> None:
        undone.append(layer)
        layer.w13_weight.data.zero_()

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "restore_weights_before_loading", undo)
    case, target = checkpoint(name)
    draft = remade(target, tmp_path / "draft")
    with served(target, draft=draft, **case.arguments) as loaded:
        shared = lend_embeddings(loaded)
        before = values_of(loaded)
        for _ in range(2):
            assert loaded.update(str(tmp_path / "new-target"))[0]
            assert differences(before, values_of(loaded)) == []
            assert loaded.config.model_path == str(draft)
            assert (shared == 3.0).all()
    assert bool(undone) == (name == "mixtral")


def lend_embeddings(loaded: Loaded) -> torch.Tensor:
    """Let the draft model use its target's embeddings, as SGLang does when both are loaded."""
    model: Any = loaded.model
    layer = model.model.embed_tokens
    lent: Any = nn.Parameter(torch.full_like(layer.weight, 3.0), requires_grad=False)
    vars(lent).update(vars(layer.weight))
    layer.weight = lent
    return lent  # type: ignore[no-any-return]


def test_a_draft_model_in_the_targets_checkpoint_follows(store: Store) -> None:
    first = store.put("v1", None)
    with served(first, draft=first, extra=OPTIONS) as loaded:
        url = store.put("v2")
        shared = lend_embeddings(loaded)
        store.fail_bodies("v2")
        with unchanged(loaded):  # the target's embeddings too, which have their new values already
            assert_fails(loaded.update(url), "status 403.*about the draft model, and the target model has been updated")
            assert_fails(loaded.update("s3://models/nothing"), "s3://models/nothing.*about the draft model")
        assert loaded.update(url)[0]
        now = tensors_of(loaded.model)
        committed = committed_of(loaded.config)
        assert isinstance(committed, Committed)
        assert committed.borrowed == {"model.embed_tokens.weight"}
        assert not (shared == 3.0).any()
        assert differences(tensors_of(load(store.scratch / "v2").model), now) == []


# -- the other ranks -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class OtherRank:
    """The group of this rank, 1, and a rank 0 that does the same but for the errors that it is told to have.

    Attributes:
        fails: by number of the meeting.
        purposes: of all meetings so far.
    """

    fails: Mapping[int, StreamError] = dataclasses.field(default_factory=dict)
    purposes: list[str] = dataclasses.field(default_factory=list)
    said: list[StreamError | None] = dataclasses.field(default_factory=list)
    rank: int = 1
    size: int = 2
    host: str = "here"

    def gather(self, value: Any, *, timeout_seconds: float) -> list[Any]:
        assert isinstance(value, Message)
        error = self.fails.get(len(self.purposes))
        self.purposes.append(value.purpose)
        self.said.append(value.error)
        return [dataclasses.replace(value, error=None if error is None else with_rank(error, 0)), value]

    def broadcast(self, value: T | None, *, source: int) -> T:
        raise NotImplementedError


CHECK = "update to s3://models/v2"
LOAD, PREPARE = "load of s3://models/v2/, the update", "preparation of s3://models/v2/, the update"
BACK = ["load of s3://models/v1/, the way back", "preparation of s3://models/v1/, the way back"]


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherRank:
    rank = OtherRank()
    monkeypatch.setattr("sglang_s3stream.loader.group_that_loads", lambda: rank)
    return rank


@pytest.mark.parametrize("meeting", [0, 1, 2])
def test_what_fails_on_another_rank_fails_here(store: Store, other: OtherRank, meeting: int) -> None:
    options = {**OPTIONS, "share": "off", "metrics_file": str(store.scratch / "{model}.prom")}
    with served(store.put("v1", None), extra=options) as loaded:
        assert other.purposes == []
        url = store.put("v2")
        other.fails = {meeting: AccessDeniedError("no", url="s3://models/v2/x")}
        with unchanged(loaded):
            assert_fails(loaded.update(url), "on rank 0, no")
        # A rank that fails comes to the vote after that in which it said so, and so does this one.
        assert other.purposes == ([CHECK] if meeting == 0 else [CHECK, LOAD, PREPARE, *BACK])
        if meeting == 1:  # this rank has read everything, and its metrics do not tell of a success
            assert (
                's3stream_load_success{url="s3://models/v2/",rank="0"} 0.0' in (store.scratch / "v2.prom").read_text()
            )
        other.purposes.clear()
        other.fails = {}
        assert loaded.update(url)[0]
        assert other.purposes == [CHECK, LOAD, PREPARE]


def test_ranks_go_back_together_or_not_at_all(store: Store, other: OtherRank) -> None:
    with served(store.put("v1", None), extra={**OPTIONS, "share": "off"}) as loaded:
        url = store.put("v2")
        other.fails = {1: LoadError("first"), 3: LoadError("second")}
        with pytest.raises(RollbackError, match=r"failed \(on rank 0, first\).*loaded again \(on rank 0, second\)"):
            loaded.update(url)


def fails_to_prepare(patch: pytest.MonkeyPatch) -> None:
    from sglang_s3stream.loader import S3StreamLoader

    original, calls = S3StreamLoader.postprocess_weights, iter([True])

    def prepare(model: nn.Module, device: torch.device) -> None:
        if next(calls, False):
            raise ValueError("no kernel")
        original(model, device)

    patch.setattr(S3StreamLoader, "postprocess_weights", staticmethod(prepare))


def fails_to_begin(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    original, calls = DefaultModelLoader.restore_weights_before_loading, iter([True])

    def restore(model: nn.Module, device: torch.device) -> None:
        if next(calls, False):
            raise ValueError("out of memory")
        original(model, device)

    patch.setattr(DefaultModelLoader, "restore_weights_before_loading", staticmethod(restore))


def fails_to_write_metrics(patch: pytest.MonkeyPatch) -> None:
    from streamer import recording
    from streamer.errors import ConfigError

    original, calls = recording.write_whole, iter([True])

    def write(path: Path, text: str, option: str) -> None:
        if next(calls, False):
            raise ConfigError("disk full")
        original(path, text, option)

    patch.setattr(recording, "write_whole", write)


@pytest.mark.parametrize(
    ("fails", "message", "first"),
    [
        (fails_to_prepare, "no kernel", PREPARE),
        (fails_to_begin, "could not begin|out of memory", LOAD),
        (fails_to_write_metrics, "disk full", PREPARE),
    ],
)
def test_whatever_fails_here_the_others_hear_of_it_and_none_waits(
    store: Store,
    other: OtherRank,
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[pytest.MonkeyPatch], None],
    message: str,
    first: str,
) -> None:
    options = {**OPTIONS, "share": "off", "metrics_file": str(store.scratch / "{model}.prom")}
    with served(store.put("v1", None), extra=options) as loaded:
        url = store.put("v2")
        fails(monkeypatch)
        with unchanged(loaded):
            assert_fails(loaded.update(url), message)
    assert other.purposes == [CHECK, LOAD, PREPARE, *BACK]
    told = dict(zip(other.purposes, other.said, strict=True))
    assert told[first] is not None
    assert all(told[purpose] is None for purpose in [CHECK, *BACK])


def test_ranks_that_are_to_load_different_objects_do_not_begin(store: Store, other: OtherRank) -> None:
    class Different(OtherRank):
        def gather(self, value: Any, *, timeout_seconds: float) -> list[Any]:
            return [dataclasses.replace(value, files=value.files[::-1]), value]

    with served(store.put("v1", None), extra={**OPTIONS, "share": "off"}) as loaded, unchanged(loaded):
        url = store.put("v2")
        other.gather = Different().gather  # type: ignore[method-assign]
        assert_fails(loaded.update(url), "do not see the same objects")
