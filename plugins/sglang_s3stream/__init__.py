"""The SGLang plugin: ``sglang serve s3://bucket/model --load-format s3stream``.

SGLang calls `register` in the processes that parse arguments and in those that load weights, through the entry point
group ``sglang.srt.plugins``. Nothing of SGLang or torch is imported before that.
"""

from __future__ import annotations

__all__ = ["LOAD_FORMAT", "register"]

LOAD_FORMAT = "s3stream"


def register() -> None:
    """Add the load format, and let SGLang accept URLs with it. May be called any number of times.

    Raises:
        MissingDependencyError: this SGLang lacks what that takes. SGLang logs it and goes on without the load format.
    """
    from sglang_s3stream.hooks import install
    from sglang_s3stream.versions import warn_if_untested

    if install():
        warn_if_untested()
