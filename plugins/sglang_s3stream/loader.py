"""The model loader that SGLang gets for ``--load-format s3stream``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from sglang_s3stream.groups import group_that_loads
from sglang_s3stream.progress import byte_progress
from sglang_s3stream.urls import options_of
from sglang_s3stream.weights import LayerOfSeveral, files_to_load
from streamer.artifacts.locate import Located, locate
from streamer.errors import ConfigError
from streamer.fetch.dtypes import check_byte_order
from streamer.missing import missing_parameters
from streamer.rank_reports import publish_metrics, rank_of_process, write_report
from streamer.recording import Recording, recording
from streamer.report import LoadReport
from streamer.session import LoadSession
from streamer.spans import span
from streamer.trace.unset import Unset

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
            CheckpointError, SourceError, LoadError: see `streamer.errors`.
        """
        self._building.close()
        check_byte_order()
        stream, rank = self._options, rank_of_process()
        url = "" if self._model_config is None else self._model_config.model_path
        with (
            recording(stream, url, rank, publish_metrics) as record,
            byte_progress(rank) as progress,
            LoadSession(model, stream, progress=progress, group=group_that_loads()) as session,
            self._use(session, record),
        ):
            with record.phase("weights"), span("trace"):
                session.run(lambda: self.load_weights_only(model, weights, target_device))
            report = self.report = record.report = session.report()
            with record.phase("check"):
                self._check_missing(session, report)
        logger.info("s3stream: %s", report.summary())
        write_report(report, stream.report_dir)
        self.postprocess_weights(model, target_device)

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

    def _get_weights_iterator(self, source: Any, **_: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the tensors of one of SGLang's ``Source``: lazy while weights are loaded, else real ones."""
        if self._model_config is None:
            self._model_config = source.model_config
        if self._session is not None:
            yield from self._weights_in(self._session, source)
            return
        with LoadSession(None, self._options.replace(mode="eager")) as session:
            yield from self._weights_in(session, source)

    def _weights_in(self, session: LoadSession, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        located = self._locate(source.model_or_path, source.revision, source.allow_patterns_overrides)
        only = files_to_load(located, source.allow_patterns_overrides, getattr(source.model_config, "hf_config", None))
        layer = LayerOfSeveral.parse(self.load_config.draft_model_idx)
        opened = located.source(self._options)
        if self._record is not None:
            self._record.reads(opened.stats)
        with self._during("headers"), span("headers"):
            part = session.open(opened, only=only, prefix=source.prefix, keep=None if layer is None else layer.keeps)
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
