"""Says in words what a model is before it is loaded, as far as its loading code could go by it.

Two models that are described alike, of the same code, make the same of the same checkpoint. And a model that is
described alike before and after its code ran was changed in its tensors' values only.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from streamer.trace.pending import storage_key, storage_of

__all__ = ["Description", "Place", "describe", "digest_of_code"]

_DEPTH = 6  # of containers and objects inside a module's attributes
_SMALL_BYTES = 1 << 16  # tensors up to this size are described with their values
_LONG = 200  # characters; longer values are given by their digest

#: A module's name and one of its members, which is a parameter, buffer, child or attribute; its class is member "".
Place: TypeAlias = tuple[str, str]

#: Whether an object is to be named only, as what it holds is known otherwise or has nothing to do with loading.
IsOpaque = Callable[[type], bool]


@dataclass(slots=True)
class Description:
    """What a model is.

    Attributes:
        texts: by place, which another process finds just so.
        attributes: what is there, for as long as this process lives.
        tensors: of the model, by where they are found: which object, which storage, and for what is no parameter or
            buffer, how often it was written to. True of this process only.
        valued: storages of tensors whose values are part of the description.
        code: classes and functions that take part.
    """

    texts: dict[Place, str] = field(default_factory=dict)
    attributes: dict[Place, object] = field(default_factory=dict)
    tensors: dict[str, tuple[torch.Tensor, int, int]] = field(default_factory=dict)
    valued: set[int] = field(default_factory=set)
    code: set[type | types.CodeType] = field(default_factory=set)

    def digest(self) -> str:
        """Return a digest of what is true of other processes too."""
        digest = hashlib.sha256()
        for (module, member), text in self.texts.items():
            digest.update(f"{module}.{member} = {text}\n".encode())
        return digest.hexdigest()

    def changes(self, after: Description) -> list[Place]:
        """Return the places where `after` says something else."""
        return [place for place in {**self.texts, **after.texts} if self.texts.get(place) != after.texts.get(place)]

    def exchanged(self, after: Description) -> str:
        """Return where another tensor was put, or into one that is no parameter or buffer was written, if anywhere."""
        for where, (tensor, *rest) in self.tensors.items():
            found, *now = after.tensors.get(where, (None,))
            if found is not tensor or now != rest:
                return where
        return ""


def describe(model: torch.nn.Module, is_opaque: IsOpaque) -> Description:
    """Describe `model`: its modules, their tensors and attributes."""
    return _Describer(is_opaque).run(model)


#: What every module has, for torch's own purposes. Hooks are empty in most.
_TORCHS_OWN = frozenset(vars(torch.nn.Module()))
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


class _Describer:
    def __init__(self, is_opaque: IsOpaque) -> None:
        self._found = Description()
        self._is_opaque = is_opaque
        self._said: dict[tuple[int, int], tuple[object, str]] = {}
        self._storages: dict[int, int] = {}

    def run(self, model: torch.nn.Module) -> Description:
        for name, module in model.named_modules():
            self._say((name, ""), self._class(type(module)))
            for registry in (module._parameters, module._buffers):
                for key, tensor in registry.items():
                    self._say((name, key), "None" if tensor is None else self._own_tensor(f"{name}.{key}", tensor))
            for key, child in module._modules.items():
                self._say((name, key), type(child).__qualname__)
            for key, value in vars(module).items():
                if key not in _TORCHS_OWN or (value and key not in _REGISTRIES) or key == "training":
                    self._found.attributes[name, key] = value
                    self._say((name, key), self._value(value, _DEPTH, f"{name}.{key}"))
        return self._found

    def _say(self, place: Place, text: str) -> None:
        if len(text) > _LONG:
            text = f"{text[: _LONG // 2]}... {hashlib.sha256(text.encode()).hexdigest()}"
        self._found.texts[place] = text

    def _own_tensor(self, place: str, tensor: torch.Tensor) -> str:
        """Describe a parameter or buffer, whose values loading is there to change."""
        self._found.tensors[place] = tensor, storage_key(tensor), 0
        attributes = self._members(vars(tensor), _DEPTH - 1, place)
        return f"{self._geometry(tensor)} {self._values(tensor)} {attributes}"

    def _geometry(self, tensor: torch.Tensor) -> str:
        storage = storage_of(tensor)
        number = self._storages.setdefault(storage_key(tensor), len(self._storages))
        return (
            f"{self._class(type(tensor))} {tensor.dtype} {tuple(tensor.size())} {tensor.stride()} "
            f"{tensor.storage_offset()} {tensor.device} {tensor.requires_grad} "
            f"of storage {number} with {storage.nbytes()}"
        )

    def _value(self, value: Any, depth: int, place: str) -> str:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            # Classes derived from these may look like anything.
            return repr(value) if type(value).__module__ == "builtins" else f"{type(value).__qualname__} {value!s}"
        if isinstance(value, (torch.dtype, torch.device, torch.Size, enum.Enum, range)):
            return str(value)
        if isinstance(value, re.Pattern):
            return f"pattern {value.pattern!r} {value.flags}"
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return self._container(value, depth, place)
        key = id(value), depth
        known = self._said.get(key)
        if known is None or known[0] is not value:
            known = self._said[key] = value, self._object(value, depth, place)
        return known[1]

    def _tensor(self, tensor: torch.Tensor, place: str) -> str:
        """Describe a tensor that is not the model's to load, and so is part of what the code goes by."""
        if tensor.layout is not torch.strided:
            return f"{self._class(type(tensor))} {tensor.dtype} {tuple(tensor.size())} {tensor.layout}"
        geometry = self._geometry(tensor)
        written = 0 if tensor.is_inference() else tensor._version
        self._found.tensors[place] = tensor, storage_key(tensor), written
        return f"{geometry} {self._values(tensor)}"

    def _values(self, tensor: torch.Tensor) -> str:
        """Return a digest of the values of maps and tables, such as the one from global experts to local ones.

        Others may be uninitialised memory, and loading code that looks at them is not repeated (`Recorder`).
        """
        is_table = not (tensor.is_floating_point() or tensor.is_complex() or isinstance(tensor, torch.nn.Parameter))
        if not is_table or tensor.is_meta or tensor.numel() * tensor.element_size() > _SMALL_BYTES:
            return ""
        self._found.valued.add(storage_key(tensor))
        raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(raw.numpy().tobytes()).hexdigest()

    def _container(self, value: Any, depth: int, place: str) -> str:
        name = type(value).__qualname__
        if not depth:
            return f"{name} of {len(value)}"
        if isinstance(value, dict):
            return f"{name} {self._members(value, depth - 1, place)}"
        items = [self._value(item, depth - 1, f"{place}[{number}]") for number, item in enumerate(value)]
        return f"{name} [{', '.join(sorted(items) if isinstance(value, (set, frozenset)) else items)}]"

    def _members(self, members: Mapping[Any, Any], depth: int, place: str) -> str:
        said = []
        for name, value in members.items():
            key = name if isinstance(name, str) else self._value(name, depth, place)
            said.append(f"{key}: {self._value(value, depth, f'{place}.{key}')}")
        return "{" + ", ".join(said) + "}"

    def _object(self, value: Any, depth: int, place: str) -> str:
        if isinstance(value, functools.partial):
            return f"partial {self._value([value.func, value.args, value.keywords], depth, place)}"
        if isinstance(value, types.MethodType):
            return f"method {self._object(value.__func__, depth, place)} of {self._value(value.__self__, depth, place)}"
        if isinstance(value, types.FunctionType):
            return self._function(value, depth, place)
        name = self._class(type(value))
        if isinstance(value, torch.nn.Module) or not depth or self._is_opaque(type(value)):
            return name
        return f"{name} {self._members(_members_of(value), depth - 1, place)}"

    def _function(self, function: types.FunctionType, depth: int, place: str) -> str:
        """Describe a function by its name and what it was made with; `code` has its text."""
        self._found.code.add(function.__code__)
        name = f"{function.__module__}.{function.__qualname__}"
        made_with = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        made_with += [function.__defaults__ or (), function.__kwdefaults__ or {}]
        return f"{name} {self._value(made_with, depth - 1, place)}" if depth else name

    def _class(self, kind: type) -> str:
        self._found.code.add(kind)
        return f"{kind.__module__}.{kind.__qualname__}"


#: Slots that hold nothing of a class's own.
_PYTHONS_OWN = frozenset({"__dict__", "__weakref__"})


def _members_of(value: object) -> dict[str, Any]:
    """Return what an object holds, in its dictionary and in slots."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = [name for listed in slots for name in ((listed,) if isinstance(listed, str) else listed)]
    members = {name: getattr(value, name) for name in names if name not in _PYTHONS_OWN and hasattr(value, name)}
    return {**members, **getattr(value, "__dict__", {})}


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def digest_of_code(parts: Iterable[type | types.CodeType]) -> str:
    """Return a digest of `parts`: of the files that define them, base classes included, and of functions' own code.

    Torch's and Python's own are known by their versions.

    Raises:
        LookupError: a class is in no file, such as one of a notebook, whose methods may change without a trace.
    """
    files = {file for part in parts for file in _files_of(part)}
    functions = [repr(_content(part)) for part in parts if isinstance(part, types.CodeType)]
    said = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files)] + sorted(functions)
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def _files_of(part: type | types.CodeType) -> Iterator[str]:
    if isinstance(part, types.CodeType):
        if Path(part.co_filename).is_file():  # not so for what was generated, which is digested itself
            yield part.co_filename
        return
    for kind in inspect.getmro(part):
        name = kind.__module__
        if name.partition(".")[0] == "torch":
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).is_file():
            yield file
        elif any(map(_is_pythons, vars(kind).values())):
            raise LookupError(f"class {kind.__qualname__} of {name} is in no file")


def _is_pythons(member: object) -> bool:
    """Whether a member of a class runs Python code; extension modules give their classes any name for a module."""
    inner = (member, getattr(member, "__func__", None), getattr(member, "fget", None))
    return any(isinstance(function, types.FunctionType) for function in inner)


def _content(code: types.CodeType) -> list[object]:
    """Return all that a function does, functions inside it included."""
    constants = [_content(value) if isinstance(value, types.CodeType) else _constant(value) for value in code.co_consts]
    return [code.co_qualname, code.co_code.hex(), code.co_names, constants]


def _constant(value: object) -> str:
    # Sets are in another order in another process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
