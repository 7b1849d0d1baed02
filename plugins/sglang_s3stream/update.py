"""`Update`: new weights for a serving model, on all ranks or on none.

SGLang's ranks update each for itself (``weight_updater.WeightUpdater.update_weights_from_disk``): there is no
collective, only the first rank's success is reported, and the way back from a failure is the same load once more, of
the new weights. What the ranks have to agree on is agreed here, and the way back leads to what was committed last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from sglang_s3stream.committed import Committed
from sglang_s3stream.hooks import is_ours
from sglang_s3stream.layouts import storages_of
from streamer.config import StreamConfig
from streamer.errors import ConfigError, LoadError, MissingParametersError, RollbackError, StreamError, shorten
from streamer.share.group import Group
from streamer.update.revision import Revision
from streamer.update.rules import different_settings, refuse_lost, refuse_other_model
from streamer.update.vote import vote

__all__ = ["Update", "Vote", "refuse_not_served"]

logger = logging.getLogger("sglang.s3stream")

_OF_DRAFT = "; this is about the draft model, and the target model has been updated"


class Vote:
    """A vote in which this rank takes part exactly once, however what it votes on ends.

    Were a rank not to come, the others would wait; were it to come twice, its second vote would count for the next.
    """

    def __init__(self, group: Group | None, config: StreamConfig, purpose: str) -> None:
        self._group = group
        self._config = config
        self._purpose = purpose
        self._is_cast = False

    def __enter__(self) -> Vote:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._is_cast and (error is None or isinstance(error, Exception)):
            self.cast(error)

    def cast(self, error: BaseException | None = None, ballot: bytes = b"") -> None:
        """Vote now; see `streamer.update.vote.vote`."""
        self._is_cast = True
        vote(self._group, self._config, self._purpose, error=error, ballot=ballot)


class Update:
    """One update on this rank, and the way back from it. Each of the loaders that SGLang makes for updates has one.

    Args:
        committed: what is served.
        model_config: SGLang's, which names the new weights already.
        group: the ranks that update together.

    Attributes:
        revision: what is to be loaded, after `check`.
        is_way_back: that is what was committed.
        group: as given; None if ranks may be gone, and each reads for itself.
    """

    revision: Revision

    def __init__(self, committed: Committed, model_config: Any, group: Group | None) -> None:
        self.committed = committed
        self.is_way_back = False
        self.group = None if _ranks_may_be_gone() else group
        self._model_config = model_config
        self._is_draft: bool = getattr(model_config, "is_draft_model", False)
        self._requested: str = model_config.model_path
        self._began = time.monotonic()
        self._cause: str | None = None

    @property
    def options(self) -> StreamConfig:
        """Those of the first load: SGLang does not hand them on."""
        options = self.committed.options
        return options if self.group is not None or options.share != "require" else options.replace(share="auto")

    def check(self, examine: Callable[[], Revision]) -> None:
        """See that the new weights can take the place of those that are served, and that there is a way back.

        Nothing has been overwritten when this raises, and all ranks do if one does.

        Args:
            examine: reads the headers of the new weights.

        Raises:
            CheckpointError, ConfigError, SourceError, LoadError: see `streamer.errors`.
        """
        try:
            with Vote(self.group, self.options, f"update to {self._requested}") as ballot:
                self._refuse_by_situation()
                self.revision = self._examined(examine)
                ballot.cast(ballot=self.revision.digest())
        except Exception as error:
            self._model_config.model_path = self.committed.model_path
            if self._is_draft:
                raise LoadError(_told(error) + _OF_DRAFT) from error
            raise
        self._warn_of_settings()

    def _examined(self, examine: Callable[[], Revision]) -> Revision:
        serving = self.committed.revision
        if self.committed.is_own_draft or _ranks_may_be_gone():
            return serving
        found = examine()
        refuse_other_model(serving, found)
        refuse_lost(serving, self.options)
        return found

    def _refuse_by_situation(self) -> None:
        from sglang.srt.runtime_context import get_model, get_parallel, get_spec

        committed = self.committed
        if _ranks_may_be_gone() and self._requested != committed.model_path:
            raise ConfigError(
                "with --elastic-ep-backend the weights cannot be updated: ranks may be gone, and all must agree",
                hint="start the engine anew with the new weights",
            )
        if get_parallel().pp_size > 1:
            raise ConfigError(
                f"with --pp-size {get_parallel().pp_size} the weights cannot be updated: SGLang updates the stages one "
                "after another, so that they could end with different weights",
                hint="start the engine anew with the new weights, or without --pp-size",
            )
        if get_spec().enable_multi_layer_eagle:
            raise ConfigError(
                "with --enable-multi-layer-eagle the weights cannot be updated: SGLang does not say which of the "
                "draft model's layers it updates",
                hint="start the engine anew with the new weights",
            )
        draft_format = get_spec().speculative_draft_load_format
        if get_spec().speculative_algorithm is not None and draft_format is not None and not is_ours(draft_format):
            raise ConfigError(
                f"with --speculative-draft-load-format {draft_format} the weights cannot be updated: SGLang updates "
                "the draft model too, which s3stream has not loaded",
                hint="start the engine with s3stream for both",
            )
        now = get_model()
        if not self._is_draft and not (is_ours(now.load_format) and now.model_path == committed.model_path):
            raise ConfigError(
                f"the weights from {committed.revision.url} were replaced by {now.model_path} with load format "
                f"{now.load_format}, to which s3stream cannot return if the update fails",
                hint="keep to load format s3stream for updates, or start the engine anew with the new weights",
            )
        if committed.stuck and not committed.is_own_draft:
            raise ConfigError(
                f"the weights cannot be updated: SGLang has prepared {len(committed.stuck)} parameters for its kernels "
                f"so that nothing can be loaded into them again: {shorten(committed.stuck)}",
                hint="start the engine anew with the new weights",
            )

    def _warn_of_settings(self) -> None:
        changed = different_settings(self.committed.revision.folder, self.revision.folder)
        if changed and (self.group is None or self.group.rank == 0):
            logger.warning(
                "s3stream: config.json of %s differs from that of %s in %s; SGLang keeps the configuration that it has",
                self.revision.url,
                self.committed.revision.url,
                shorten(changed),
            )

    @property
    def keeps_all(self) -> bool:
        """Whether the memory holds what is to be loaded.

        SGLang updates a draft model with the target model, also one that has a checkpoint of its own, whose weights
        are none of the update's business.
        """
        return self.committed.is_own_draft and not self.committed.has_undone

    def vote(self, purpose: str) -> Vote:
        """Return a vote of this update, for one of its steps."""
        way = "the way back" if self.is_way_back else "the update"
        return Vote(self.group, self.options, f"{purpose} of {self.revision.url}, {way}")

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Surround a load, votes included, so that it ends alike on all ranks.

        Raises:
            LoadError: the update failed. SGLang then asks for the weights again, and gets those that were committed.
            RollbackError: and so did that.
        """
        try:
            yield
        except Exception as error:
            new, old = self._requested, self.committed.revision.url
            if self.is_way_back:
                raise RollbackError(
                    f"the update to {new} failed ({self._cause}), and {old} could not be loaded again ({_told(error)})",
                    hint="what is in memory is a mixture, and not served; start the engine anew",
                ) from error
            self._cause = _told(error)
            text = f"the update to {new} failed, and all ranks go back to serving {old}: {self._cause}"
            if self._is_draft:
                text += _OF_DRAFT
            logger.exception("s3stream: %s", text)
            raise LoadError(text) from error

    def turn_back(self) -> None:
        """Load what was committed, for the update has failed."""
        self.is_way_back = True
        self.revision = self.committed.revision
        self._model_config.model_path = self.committed.model_path

    @property
    def has_failed(self) -> bool:
        return self._cause is not None

    def borrowed(self, model: nn.Module) -> frozenset[str]:
        """Return the parameters of a draft model that are another's by now, such as the target model's embeddings."""
        known = self.committed.storages
        now = storages_of(model, known)
        return self.committed.borrowed | {name for name, key in now.items() if known[name] != key}

    def refuse_incomplete(self, loaded: Collection[str], expected: Collection[str]) -> None:
        """See that no parameter still has its old values.

        Raises:
            MissingParametersError: one has.
        """
        names = sorted(self.committed.loaded.intersection(expected).difference(loaded))
        if names:
            raise MissingParametersError(
                f"{self.revision.url} has no new values for {len(names)} parameters: {shorten(names)}",
                names=names,
                hint="the model's code loads them from the served checkpoint only; start the engine anew instead",
            )

    def commit(self, model: nn.Module, loaded: frozenset[str] | None) -> None:
        """Take down what is served now, after the last vote.

        Args:
            loaded: parameters that got values, or None if only some were meant to, of the same weights as before.
        """
        seconds = time.monotonic() - self._began
        if self.is_way_back:
            logger.warning("s3stream: %s is served again, %.1f s after the update began", self.revision.url, seconds)
            return
        kept, borrowed = self.committed, self.borrowed(model)
        changes: dict[str, Any] = {} if loaded is None else {"loaded": loaded}
        if kept.is_own_draft:
            self._model_config.model_path = kept.model_path
        else:
            changes.update(revision=self.revision, model_path=self._requested)
        storages = storages_of(model, kept.storages.keys() - borrowed)
        dataclasses.replace(kept, borrowed=borrowed, storages=storages, **changes).keep_on(self._model_config)
        what = "the draft model keeps" if kept.is_own_draft else "updated to"
        logger.info("s3stream: %s %s, %.1f s after the update began", what, self.revision.url, seconds)


def refuse_not_served(committed: Committed | None, model_path: str) -> Committed:
    """Return what is `committed`.

    Raises:
        ConfigError: nothing is.
    """
    if committed is None:
        raise ConfigError(
            f"the weights cannot be updated to {model_path} with load format s3stream: those that are served were "
            "loaded with another, to which s3stream could not return if the update failed",
            hint="start the engine with --load-format s3stream, or update with the load format that it has",
        )
    return committed


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, StreamError) else f"{type(error).__name__}: {error}"


def _ranks_may_be_gone() -> bool:
    """Whether SGLang goes on without ranks that are lost. It then reloads experts on the ranks that miss some."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().moe.elastic_ep_backend is not None
