"""Stands in for what SGLang imports and a machine without GPU cannot have: CUDA's kernels, and torchvision.

Weights are loaded before kernels run, so nothing that is tested calls what is stubbed. Processes that SGLang starts
get the same by `sitecustomize`, from this folder on PYTHONPATH.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

__all__ = ["install"]


class _Base:
    """What a stubbed class is made of, so that SGLang may derive from it."""


class _Stub(ModuleType):
    """A module, or anything in one: may be called, as a decorator too, and has every attribute."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (_Base,), {}) if name[:1].isupper() else _Stub(f"{self.__name__}.{name}")
        if isinstance(made, _Stub):
            sys.modules[made.__name__] = made
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._names or _asked_by_transformers(sys._getframe(1)):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def _asked_by_transformers(frame: FrameType | None) -> bool:
    """Whether Transformers only wants to know what is installed; it would then use it."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("import_utils.py") and "transformers" in file:
            return True
        frame = frame.f_back
    return False


def install(names: Iterable[str]) -> None:
    """Let the packages `names` be imported in this process where they are not installed."""
    sys.meta_path.append(_Finder(names))
