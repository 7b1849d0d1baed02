"""The model loader that SGLang gets for ``--load-format s3stream``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from sglang_s3stream.circumstances import circumstances_of_sglang
from sglang_s3stream.committed import Committed, committed_of
from sglang_s3stream.groups import group_that_loads
from sglang_s3stream.layouts import Layout, has_undone_layers, layouts_of, left_alone, storages_of, stuck_parameters
from sglang_s3stream.progress import byte_progress
from sglang_s3stream.update import Update, refuse_not_served
from sglang_s3stream.urls import options_of
from sglang_s3stream.weights import LayerOfSeveral, files_to_load
from streamer.artifacts.locate import Located, locate
from streamer.errors import ConfigError, LoadError
from streamer.fetch.dtypes import check_byte_order
from streamer.missing import missing_parameters
from streamer.plan_cache.cache import Circumstances
from streamer.rank_reports import publish_metrics, rank_of_process, write_report
from streamer.recording import Recording, recording
from streamer.report import LoadReport
from streamer.session import LoadSession
from streamer.share.group import Group
from streamer.sources.base import Source as OpenSource
from streamer.spans import span
from streamer.trace.unset import Unset
from streamer.update.revision import Revision, examine

__all__ = ["S3StreamLoader"]

logger = logging.getLogger("sglang.s3stream")

Weights = Iterable[tuple[str, torch.Tensor]]


class S3StreamLoader(DefaultModelLoader):  # type: ignore[misc]  # no types of SGLang where this is checked
    """SGLang's default loader with another source of tensors.

    What the default loader does around its iterator is inherited, so that it is what the installed version does:
    building the model, secondary weights, renamed scales, processing for kernels.

    Raises:
        ConfigError: ``model_loader_extra_config`` has an unknown key or a wrong value.
    """

    def __init__(self, load_config: Any) -> None:
        self._options = options_of(load_config.model_loader_extra_config)
        # SGLang reads LoRA adapters by a default loader of the same configuration (``lora/lora.py``), which knows
        # neither our format nor our options. SGLang's own PreshardedModelLoader does this too.
        load_config.load_format = LoadFormat.AUTO
        load_config.model_loader_extra_config = {}
        super().__init__(load_config)
        self._session: LoadSession | None = None
        self._record: Recording | None = None
        self._model_config: Any = None
        self._building = contextlib.ExitStack()
        self._unset: Unset | None = None
        self._loading: Revision | None = None
        self._update: Update | None = None
        self._handed_out: Weights | None = None
        self.report: LoadReport | None = None
        """Of the last load."""

    def download_model(self, model_config: Any) -> None:
        """Bring weights from the hub to this machine; those behind URLs stay where they are."""
        self._locate(model_config.model_path, model_config.revision)

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Build this rank's model and load its weights.

        Raises:
            CheckpointError, SourceError, LoadError: see `streamer.errors`.
        """
        self._model_config = model_config
        with contextlib.ExitStack() as self._building:
            self._unset = self._building.enter_context(Unset())
            model: nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        return model

    def load_weights_and_postprocess(self, model: nn.Module, weights: Weights, target_device: torch.device) -> None:
        """Load `weights`, which come from our iterator, and let SGLang prepare them for its kernels.

        A static method of the default loader, which SGLang calls on its loaders.

        Raises:
            MissingParametersError: parameters got no values, and ``strict`` is on.
            RollbackError: an update failed, and this, the way back from it, did too.
            CheckpointError, SourceError, LoadError: see `streamer.errors`.
        """
        self._building.close()
        if self._update is not None:
            self._load_update(self._update, model, weights, target_device)
            return
        url = "" if self._model_config is None else self._model_config.model_path
        with recording(self._options, url, rank_of_process(), publish_metrics) as record:
            report = self._load(model, weights, target_device, record, group_that_loads(), self._check_missing)
        before = layouts_of(model)
        self.postprocess_weights(model, target_device)
        if self._model_config is not None and self._loading is not None:
            self._commit_first(model, self._loading, report, before)

    def _load(
        self,
        model: nn.Module,
        weights: Weights,
        target_device: torch.device,
        record: Recording,
        group: Group | None,
        check: Callable[[LoadSession, LoadReport], None],
    ) -> LoadReport:
        check_byte_order()
        with (
            byte_progress(rank_of_process()) as progress,
            LoadSession(
                model, self._options, progress=progress, group=group, circumstances=self._circumstances()
            ) as session,
            self._use(session, record),
        ):
            with record.phase("weights"), span("trace"):
                session.run(lambda given: self.load_weights_only(model, given, target_device), weights)
            report = self.report = record.report = session.report()
            with record.phase("check"):
                check(session, report)
        logger.info("s3stream: %s", report.summary())
        write_report(report, self._options.report_dir)
        return report

    def _circumstances(self) -> Circumstances | None:
        """Say what the model's code may go by, for the plan cache; None in an update, whose model is in use."""
        return circumstances_of_sglang() if self._update is None else None

    def _commit_first(
        self, model: nn.Module, revision: Revision, report: LoadReport, before: Mapping[str, Layout]
    ) -> None:
        from sglang.srt.runtime_context import get_model

        config, loaded = self._model_config, frozenset(report.loaded)
        is_draft = getattr(config, "is_draft_model", False)
        Committed(
            revision=revision,
            model_path=config.model_path,
            options=self._options,
            ignore_patterns=self.load_config.ignore_patterns,
            loaded=loaded,
            stuck=stuck_parameters(model, before, loaded),
            has_undone=has_undone_layers(model),
            is_own_draft=is_draft and config.model_path.rstrip("/") != get_model().model_path.rstrip("/"),
            storages=storages_of(model, loaded) if is_draft else {},
        ).keep_on(config)

    # -- updates -------------------------------------------------------------------------------------------

    def _begin_update(self, source: Any) -> Update:
        """See that the model can be updated to `source`; the engine has nothing else to say about it."""
        committed = refuse_not_served(committed_of(source.model_config), source.model_or_path)
        self._model_config = source.model_config
        update = Update(committed, source.model_config, group_that_loads())
        self._options = update.options
        self.load_config.ignore_patterns = committed.ignore_patterns

        def look() -> Revision:
            located, only = self._choose(source)
            return examine(located.source(self._options), located, self._options, only=only)

        update.check(look)
        return update

    def _load_update(self, update: Update, model: nn.Module, weights: Weights, target_device: torch.device) -> None:
        if update.keeps_all:
            update.commit(model, None)
            return
        # A reload of the experts that a rank misses (``eplb_manager``) leaves out the others.
        is_part = weights is not self._handed_out and update.revision.is_same(update.committed.revision)

        def check(session: LoadSession, report: LoadReport) -> None:
            if not is_part:
                update.refuse_incomplete(report.loaded, session.expected())

        # What a draft model shares with the target model has the target model's new values already.
        keeps_old = update.is_way_back or update.committed.is_own_draft
        with update.attempt(), update.vote("preparation"):
            with (
                update.vote("load") as all_loaded,
                left_alone(model, update.borrowed(model) if keeps_old else ()),
                recording(self._options, update.revision.url, rank_of_process(), publish_metrics) as record,
            ):
                report = self._load(model, weights, target_device, record, update.group, check)
                all_loaded.cast()
            self.postprocess_weights(model, target_device)
        update.commit(model, None if is_part else frozenset(report.loaded))

    def _turn_back(self, update: Update) -> None:
        if not update.has_failed:
            # SGLang failed on this rank before it loaded anything. The others do not know, and are loading.
            with (
                contextlib.suppress(LoadError),
                update.attempt(),
                update.vote("preparation"),
                update.vote("load"),
                LoadSession(None, self._options, group=update.group),
            ):
                raise LoadError("SGLang could not begin to load the new weights", hint="see the log of that rank")
        update.turn_back()

    # -- what is handed out --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _use(self, session: LoadSession, record: Recording) -> Iterator[None]:
        self._session, self._record, self.report = session, record, None
        try:
            yield
        finally:
            self._session = self._record = None

    def _check_missing(self, session: LoadSession, report: LoadReport) -> None:
        """Raise for parameters without values, or warn where SGLang gives some their values later.

        Such are what quantisation computes of others, and a draft model's embeddings, which are its target's.
        """
        loaded, expected = set(report.loaded), session.expected()
        missing = [name for name in sorted(expected) if name not in loaded and self._is_unset(expected[name])]
        if not missing:
            return
        error = missing_parameters(report, missing, session.names())
        config = self._model_config
        lenient = getattr(config, "quantization", None) is not None or getattr(config, "is_draft_model", False)
        if self._options.strict and not lenient:
            raise error
        logger.warning("s3stream: %s", error.message)

    def _is_unset(self, parameter: torch.Tensor) -> bool:
        return self._unset is not None and parameter in self._unset

    def _get_weights_iterator(self, source: Any, **_: Any) -> Weights:
        """Return the tensors of one of SGLang's ``Source``, for the load that consumes them.

        Called outside a load, this begins an update, and called again, the way back from it. All that can be known
        before a load is checked then, for an error here leaves the weights as they are.

        Raises:
            CheckpointError, ConfigError, SourceError, LoadError: see `streamer.errors`.
        """
        if self._model_config is None:
            self._model_config = source.model_config
        if self._session is not None:
            return self._weights_in(self._session, source)
        if self._update is None:
            self._update = self._begin_update(source)
        else:
            self._turn_back(self._update)
        self._handed_out = self._weights_of(self._update.revision)
        return self._handed_out

    def _weights_of(self, revision: Revision) -> Weights:
        assert self._session is not None
        yield from self._read(self._session, revision.source(self._options), revision.files)

    def _weights_in(self, session: LoadSession, source: Any) -> Weights:
        located, only = self._choose(source)
        opened = located.source(self._options)
        yield from self._read(session, opened, only, prefix=source.prefix, located=located)

    def _choose(self, source: Any) -> tuple[Located, list[str]]:
        located = self._locate(source.model_or_path, source.revision, source.allow_patterns_overrides)
        hf_config = getattr(source.model_config, "hf_config", None)
        return located, files_to_load(located, source.allow_patterns_overrides, hf_config)

    def _read(
        self,
        session: LoadSession,
        source: OpenSource,
        only: Sequence[str],
        *,
        prefix: str = "",
        located: Located | None = None,
    ) -> Weights:
        layer = LayerOfSeveral.parse(self.load_config.draft_model_idx)
        if self._record is not None:
            self._record.reads(source.stats)
        with self._during("headers"), span("headers"):
            part = session.open(source, only=only, prefix=prefix, keep=None if layer is None else layer.keeps)
            # SGLang loads the model first, and updates nothing but that; further sources belong to its code.
            if self._loading is None and located is not None:
                self._loading = Revision.of(located, part.engine, part.opened)
        for name, tensor in session.weights(part):
            # Without this mark SGLang gives tensors to other threads (``model_loader/utils.should_async_load``), in
            # which nobody would see what is written, nor complete what is pending before it is read.
            tensor._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]
            yield name if layer is None else layer.rename(name), tensor

    def _during(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._record is None else self._record.phase(phase)

    def _locate(self, model: str, revision: str | None, patterns: list[str] | None = None) -> Located:
        def from_hub(name: str, revision: str | None, subfolder: str | None) -> tuple[str, list[str]]:
            """Have SGLang download a repository; return its folder and the files to read."""
            folder, files, is_safetensors = self._prepare_weights(name, revision, False, patterns)
            if not is_safetensors:
                raise ConfigError(f"{name} has no safetensors files", hint="use SGLang's default load format for it")
            return folder, files

        return locate(model, revision, None, self._options, from_hub).without(self.load_config.ignore_patterns)
