"""The model loader that vLLM gets for ``load_format="s3stream"``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from streamer.artifacts.locate import Located, locate
from streamer.errors import ConfigError
from streamer.fetch.dtypes import check_byte_order
from streamer.missing import missing_parameters
from streamer.plan_cache.cache import Circumstances
from streamer.rank_reports import publish_metrics, rank_of_process, write_report
from streamer.recording import Recording, recording
from streamer.report import LoadReport
from streamer.session import LoadSession, OpenedPart
from streamer.sources import Source
from streamer.spans import span
from vllm_s3stream.circumstances import circumstances_of_vllm
from vllm_s3stream.groups import group_that_loads
from vllm_s3stream.options import PluginOptions
from vllm_s3stream.progress import byte_progress
from vllm_s3stream.quantisation import complete_before_processing, finish_delayed_layers, is_quantised_online
from vllm_s3stream.sharded import files_of_this_rank, fill_state_dict
from vllm_s3stream.torchao import unflattened
from vllm_s3stream.update.layout import Layout
from vllm_s3stream.update.record import keep_record, updates_are_wanted
from vllm_s3stream.versions import require
from vllm_s3stream.weights import ShardFilter

__all__ = ["S3StreamLoader"]

logger = init_logger("vllm.s3stream")  # below "vllm", whose handlers print it

Weights = Iterable[tuple[str, torch.Tensor]]


class S3StreamLoader(DefaultModelLoader):  # type: ignore[misc]  # no types of vLLM where this is checked
    """vLLM's default loader with another source of tensors.

    What the default loader does around its iterator is inherited, so that it is what the installed version
    does: secondary weights, prefixes, filters, the check of unloaded parameters, the log lines.

    Raises:
        ConfigError: ``model_loader_extra_config`` has an unknown key or a wrong value.
        MissingDependencyError: this vLLM is not built as those that we know.
    """

    def __init__(self, load_config: Any) -> None:
        require(DefaultModelLoader, "_get_weights_iterator", "_prepare_weights", "track_weights_loading")
        self._options = PluginOptions.parse(load_config.model_loader_extra_config or {})
        own = {}
        if self._options.enable_weights_track is not None:
            own["enable_weights_track"] = self._options.enable_weights_track
        # The parent refuses what it does not know, and downloads from the hub by its own format's rules.
        super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config=own))
        self._session: LoadSession | None = None
        self._record: Recording | None = None
        self._opened: list[tuple[Located, OpenedPart]] = []
        self.report: LoadReport | None = None
        """Of the last load."""

    def download_model(self, model_config: Any) -> None:
        """Bring weights from the hub to this machine; those behind URLs stay where they are."""
        self._locate(model_config.model, model_config.revision)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load this rank's weights into `model`.

        Raises:
            CheckpointError, SourceError, LoadError: see `streamer.errors`.
        """
        check_byte_order()
        # A loader may be used again, for a draft model.
        self.counter_before_loading_weights = 0.0
        stream = self._options.stream
        # Sharded state has files of its own for every rank.
        group = None if self._options.sharded else group_that_loads()
        with (
            recording(stream, self._name_of(model_config), rank_of_process(), publish_metrics) as record,
            byte_progress(self.load_config.use_tqdm_on_load) as progress,
            LoadSession(model, stream, progress=progress, group=group, circumstances=self._circumstances()) as session,
            self._use(session, record),
            complete_before_processing(model, session.complete_touching, session.complete_touching_alone),
        ):
            session.may_overlap = not is_quantised_online(model)  # vLLM's own collectives are among the layers
            if self._options.sharded:
                self._load_sharded(session, model, model_config)
            else:
                super().load_weights(
                    _Proxy(model, functools.partial(self._load_traced, session, model_config)), model_config
                )
        report = self.report
        assert report is not None
        logger.info("s3stream: %s", report.summary())
        write_report(report, stream.report_dir)

    def _load_traced(self, session: LoadSession, model_config: Any, weights: Weights) -> Any:
        """Run the model's own ``load_weights``; vLLM's loader calls this in its place."""
        model = session.model

        def load(given: Weights) -> Any:
            loaded = self._call(model, given)
            finish_delayed_layers(model, model_config)
            return loaded

        with self._during("weights"), span("trace"), self._watch(session):
            loaded = session.run(load, weights)
        session.note(loaded=loaded or ())
        self._take_report(session)
        return loaded

    def _circumstances(self) -> Circumstances | None:
        """Say what the model's loading code may go by, for the plan cache; None where it is not all that runs."""
        return None if self._options.sharded else circumstances_of_vllm()

    def _name_of(self, model_config: Any) -> str:
        return str(model_config.model)

    def _call(self, model: nn.Module, weights: Weights) -> Any:
        method: Any = model.load_weights
        return method(weights)

    @contextlib.contextmanager
    def _watch(self, session: LoadSession) -> Iterator[None]:
        """Take down, where the model may be updated later, what that needs to know of its load."""
        layout = Layout.of(session.model) if updates_are_wanted() else None
        yield
        if layout is not None:
            layout.settle(session.tracer.copies.writes)
            keep_record(session.model, layout, self._opened)

    def _load_sharded(self, session: LoadSession, model: nn.Module, model_config: Any) -> None:
        began = time.perf_counter()
        located = self._locate(model_config.model, model_config.revision)
        files = files_of_this_rank(located, self._options.pattern)
        part = self._open(session, located.source(self._options.stream), only=files)
        fill = fill_state_dict(model)
        with self._during("weights"), span("trace"):
            session.run(fill, session.weights(part))
        self._take_report(session)
        logger.info_once("Loading weights took %.2f seconds", time.perf_counter() - began)

    @contextlib.contextmanager
    def _use(self, session: LoadSession, record: Recording) -> Iterator[None]:
        self._session, self._record, self.report = session, record, None
        self._opened.clear()
        try:
            yield
        finally:
            self._session = self._record = None
            self._opened.clear()

    def _take_report(self, session: LoadSession) -> None:
        self.report = session.report()
        if self._record is not None:
            self._record.report = self.report

    def _during(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._record is None else self._record.phase(phase)

    def _open(self, session: LoadSession, source: Source, **choices: Any) -> OpenedPart:
        """Open a part, as what is recorded of a load."""
        if self._record is not None:
            self._record.reads(source.stats)
        with self._during("headers"), span("headers"):
            return session.open(source, **choices)

    def _get_weights_iterator(self, source: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the tensors of one of vLLM's ``Source``: lazy during `load_weights`, else real ones."""
        if self._session is not None:
            yield from self._weights_in(self._session, source)
            return
        # vLLM reads weights without us when it reloads a model in place.
        stream = self._options.stream.replace(mode="eager")
        with LoadSession(None, stream) as session:
            yield from self._weights_in(session, source)

    def _weights_in(self, session: LoadSession, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        patterns = source.allow_patterns_overrides
        located = self._locate(source.model_or_path, source.revision, source.subfolder, patterns)
        keep = ShardFilter(
            located.folder,
            is_unused=getattr(source, "is_unused_weight", None),
            encoder_only_prefixes=getattr(self, "_encoder_only_lm_prefixes", None),
            weights_mapper=getattr(self, "_encoder_only_weights_mapper", None),
            local_expert_ids=getattr(self, "local_expert_ids", None),
        )
        only = self._files_of(located, patterns)
        opened = located.source(self._options.stream)
        part = self._open(session, opened, only=only, prefix=source.prefix, keep=keep)
        self._opened.append((located, part))
        if self.load_config.safetensors_load_strategy == "torchao":
            return unflattened(session, part)
        return session.weights(part)

    def _locate(
        self, model: str, revision: str | None, subfolder: str | None = None, patterns: list[str] | None = None
    ) -> Located:
        from_hub = functools.partial(self._from_hub, patterns=patterns)
        located = locate(model, revision, subfolder, self._options.stream, from_hub)
        return located.without(self.load_config.ignore_patterns)

    def _files_of(self, located: Located, patterns: list[str] | None) -> list[str]:
        return located.chosen(patterns)

    def _from_hub(
        self, name: str, revision: str | None, subfolder: str | None, *, patterns: list[str] | None
    ) -> tuple[str, list[str]]:
        """Have vLLM download a repository; return its folder and the files to read."""
        folder, files, is_safetensors, *_ = self._prepare_weights(name, subfolder, revision, False, patterns)
        if not is_safetensors:
            raise ConfigError(f"{name} has no safetensors files", hint="use vLLM's default load format for it")
        return folder, files

    def track_weights_loading(self, model: nn.Module, loaded_weights: set[str] | None, **options: Any) -> None:
        """Let vLLM decide which parameters are missing; say which tensors come nearest.

        Raises:
            MissingParametersError: some got no values that had to.
        """
        try:
            super().track_weights_loading(model, loaded_weights, **options)
        except ValueError as error:
            if self._session is None or self.report is None:
                raise
            loaded = loaded_weights or set()
            names = sorted(name for name, _ in model.named_parameters() if name not in loaded)
            missing = missing_parameters(self.report, names, self._session.names())
            if self._options.stream.strict:
                with self._during("check"):
                    raise missing from error
            logger.warning("s3stream: %s", missing.message)


class _Proxy:
    """The model as vLLM's loader sees it, its ``load_weights`` run under the trace."""

    def __init__(self, model: nn.Module, load_weights: Callable[[Weights], Any]) -> None:
        self._model = model
        self.load_weights = load_weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
