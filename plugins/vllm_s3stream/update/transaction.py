"""One rank's part in an update: examine, stage, commit, and the way back; after each step, all ranks vote.

Until all have staged, nothing that is served was written to, and a failure anywhere means that all serve on as they
were. A failure after that sends all back to what they were loaded from, which was seen to be readable before.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from streamer.artifacts.locate import Located
from streamer.errors import LoadError, RollbackError, StreamError, shorten
from streamer.session import LoadSession
from streamer.share.group import Group
from streamer.update.host_memory import require_host_memory
from streamer.update.revision import Revision, examine
from streamer.update.rules import different_settings, refuse_lost, refuse_other_model
from streamer.update.vote import vote
from vllm_s3stream.loader import S3StreamLoader, Weights
from vllm_s3stream.options import PluginOptions
from vllm_s3stream.update.commit import Commit, refuse_torn_ties
from vllm_s3stream.update.gates import refuse_model
from vllm_s3stream.update.record import Served, record_of
from vllm_s3stream.update.twins import Staged, Twins

__all__ = ["RevisionLoader", "Transaction", "as_loading"]

logger = logging.getLogger("vllm.s3stream")

Result = TypeVar("Result")


class RevisionLoader(S3StreamLoader):
    """Loads one revision into the twins of a model.

    Args:
        revision: whose objects are read, and no others.

    Attributes:
        staged: the new values, after `load_weights`.
    """

    def __init__(self, load_config: Any, revision: Revision, twins: Twins) -> None:
        super().__init__(load_config)
        self._revision = revision
        self._twins = twins
        self.staged: Staged = {}

    def _locate(self, *_: Any, **__: Any) -> Located:
        revision = self._revision
        return Located(revision.url, revision.folder, revision.items, tuple(item.key for item in revision.items))

    def _files_of(self, located: Located, patterns: list[str] | None) -> list[str]:
        return list(self._revision.files)

    def _name_of(self, model_config: Any) -> str:
        return self._revision.url

    def _call(self, model: nn.Module, weights: Weights) -> Any:
        with self._twins.guard:
            return super()._call(model, weights)

    @contextlib.contextmanager
    def _watch(self, session: LoadSession) -> Iterator[None]:
        yield
        self.staged = self._twins.collect(session.tracer.copies.writes)


class Transaction:
    """An update of `model`, of which every rank has one.

    Args:
        group: all ranks that have parts of the model; None for a rank that is alone.
        forget: called after new weights are in place, to drop what was made of the old ones.

    Attributes:
        fetched_bytes: received for the new weights, by this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: Any,
        options: PluginOptions,
        group: Group | None,
        *,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._load_config = vllm_config.load_config
        self._model_config = vllm_config.model_config
        self._options = options
        self._group = group
        self._forget = forget
        self.fetched_bytes = 0

    def run(self, url: str, version: str | None) -> None:
        """Bring the weights at `url` into the model, on all ranks. A collective.

        Raises:
            StreamError: on all ranks alike; the model is as it was.
            RollbackError: it is not, and must not be run any more.
        """
        served, new = self._together(f"update to {url}", lambda: self._examine(url), ballot=lambda it: it[1].digest())
        self._together(f"make room for {url}", lambda: self._require_memory(served))
        staged = self._together(f"load {url}", lambda: self._stage(served, new))
        commit = Commit(served.layout, self._model_config)
        try:
            self._together(f"commit {url}", lambda: self._commit(commit, staged))
        except StreamError as error:
            staged.clear()
            self._go_back(served, commit, error)
            raise
        served.revision = new.named(url if version is None else version)

    def _together(
        self, purpose: str, step: Callable[[], Result], ballot: Callable[[Result], bytes] = lambda _: b""
    ) -> Result:
        """Do `step` and vote; return what it returned, if it succeeded on all ranks."""
        outcome: list[Result] = []
        failed: Exception | None = None
        try:
            outcome.append(step())
        except Exception as error:
            logger.exception("s3stream: could not %s", purpose)
            traceback.clear_frames(error.__traceback__)  # which hold tensors that the way back needs the room of
            failed = error
        try:
            vote(
                self._group,
                self._options.stream,
                purpose,
                error=failed,
                ballot=ballot(outcome[0]) if outcome else b"",
            )
        except StreamError:
            raise
        except Exception as error:  # a rank that is alone raises its own
            raise LoadError(f"{purpose}: {type(error).__name__}: {error}", hint="see the log") from error
        return outcome[0]

    def _examine(self, url: str) -> tuple[Served, Revision]:
        served = record_of(self._model)
        refuse_model(self._model, parts=served.parts)
        config = self._options.stream
        loader = S3StreamLoader(self._load_config)
        patterns = getattr(self._model, "allow_patterns_overrides", None)
        located = loader._locate(url, None, None, patterns)
        new = examine(located.source(config), located, config, only=located.chosen(patterns))
        refuse_other_model(served.revision, new)
        refuse_lost(served.revision, config)
        different = different_settings(served.revision.folder, new.folder)
        if different:
            logger.warning(
                "s3stream: config.json of %s differs from that of %s in %s; the engine keeps what it started with",
                new.url,
                served.revision.url,
                shorten(different),
            )
        return served, new

    def _require_memory(self, served: Served) -> None:
        """Ask once for what every rank's twins take, all together."""
        nbytes = served.layout.nbytes()
        require_host_memory(self._group, self._options.stream, nbytes, purpose="a copy of the new weights")

    def _stage(self, served: Served, revision: Revision) -> Staged:
        with Twins(self._model, served.layout) as twins:
            loader = RevisionLoader(self._load_config, revision, twins)
            loader.load_weights(self._model, self._model_config)
        if loader.report is not None:
            self.fetched_bytes = loader.report.fetched_bytes
        refuse_torn_ties(served.layout, loader.staged)
        return loader.staged

    def _commit(self, commit: Commit, staged: Staged, *, only: set[nn.Module] | None = None) -> None:
        commit.run(staged, only=only)
        self._forget()

    def _go_back(self, served: Served, failed: Commit, why: StreamError) -> None:
        """Load what was served again, on all ranks, into those layers that are not as they were.

        Raises:
            RollbackError: that failed too.
        """
        logger.error("s3stream: the update failed while it was committed, and is undone: %s", why)
        back = Commit(served.layout, self._model_config)
        try:
            staged = self._together("load what was served", lambda: self._stage(served, served.revision))
            self._together("restore what was served", lambda: self._commit(back, staged, only=failed.begun))
        except StreamError as error:
            served.lost = RollbackError(
                f"an update failed ({why.message}), and what was served before could not be restored: {error}",
                hint="the model's weights are a mixture; start the engine anew",
            )
            raise served.lost from error


def as_loading(vllm_config: Any) -> contextlib.AbstractContextManager[Any]:
    """Be in the state in which vLLM calls a loader."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    stack = contextlib.ExitStack()
    stack.enter_context(set_current_vllm_config(vllm_config))
    stack.enter_context(set_default_torch_dtype(vllm_config.model_config.dtype))
    stack.enter_context(torch.inference_mode(False))
    return stack
