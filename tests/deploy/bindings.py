"""Terraform provider schemas, rebuilt from the language bindings that are generated from them.

The providers themselves come from one registry only, and weigh half a gigabyte. Their bindings for Python lie on
package indexes and say everything that a schema says: per attribute, in a comment, whether it is computed, optional or
required; per class, in the table from which it is written out, its type and whether it is a block. This module reads
those of the types it is asked for and returns what ``terraform providers schema -json`` would print of them.

Only the bindings of one generator (cdktn 25, with jsii) were looked at, so whatever is not understood is an error
rather than a guess: a schema that takes anything would let any mistake through.
"""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["read_schema"]

#: As in Terraform's JSON: a name or a pair of a collection and its elements' type.
Type = str | list[Any]

_ATTRIBUTE = re.compile(r"^ +// ([a-z0-9_]+) - computed: (true|false), optional: (true|false), required: (true|false)$")
_CLASS = re.compile(r"^class (\w+) extends cdktn\.(\w+) \{")
_TABLE = re.compile(r"^function (\w+)ToHclTerraform\(struct\) \{")
_OWN_TABLE = re.compile(r"^ +synthesizeHclAttributes\(\) \{")
_ENTRY = re.compile(r'^ +"?([a-z0-9_]+)"?: \{$')
_FACT = re.compile(r'^ +(isBlock|type|storageClassType): "?(\w+)"?,$')
_MEMBER = re.compile(r'= new (?:cdktn\.)?(\w+)\(this, "([a-z0-9_]+)"')
_GETTER = re.compile(r"this\.(get\w+Attribute|interpolationForAttribute)\(")
_RESOURCE_TYPE = re.compile(r'static tfResourceType = "([a-z0-9_]+)"')

_BY_STORAGE: dict[str, Type] = {
    "string": "string",
    "number": "number",
    "boolean": "bool",
    "any": "dynamic",
    "stringList": ["list", "string"],
    "numberList": ["list", "number"],
    "stringListList": ["list", ["list", "string"]],
    "stringMap": ["map", "string"],
    "numberMap": ["map", "number"],
    "booleanMap": ["map", "bool"],
    "stringMapList": ["list", ["map", "string"]],
}
_BY_GETTER: dict[str, Type] = {
    "getStringAttribute": "string",
    "getNumberAttribute": "number",
    "getBooleanAttribute": "bool",
    "getListAttribute": ["list", "string"],
    "getNumberListAttribute": ["list", "number"],
    "getStringMapAttribute": ["map", "string"],
    "getNumberMapAttribute": ["map", "number"],
    "getBooleanMapAttribute": ["map", "bool"],
    "interpolationForAttribute": "dynamic",
}
_BY_HELPER: dict[str, Type] = {
    "StringMap": ["map", "string"],
    "NumberMap": ["map", "number"],
    "BooleanMap": ["map", "bool"],
    "AnyMap": ["map", "dynamic"],
    "StringMapList": ["list", ["map", "string"]],
    "StringListList": ["list", ["list", "string"]],
    "NumberListList": ["list", ["list", "number"]],
}
_KINDS = {"TerraformResource": "resource_schemas", "TerraformDataSource": "data_source_schemas"}


@dataclass(slots=True)
class _Attribute:
    flags: dict[str, bool]
    body: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Module:
    """One ``index.js``: its classes, and the tables by which they are written out."""

    kinds: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, dict[str, _Attribute]] = field(default_factory=dict)
    tables: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)


def read_schema(wheel: Path, types: Iterable[str]) -> dict[str, Any]:
    """Return the schema of the provider whose bindings `wheel` holds, with only the given `types`.

    Args:
        wheel: of a package ``cdktn-provider-*``.
        types: of resources, such as ``aws_s3_bucket``; those of data sources begin with ``data.``.

    Raises:
        ValueError: a type is not in the bindings, or something in them is not understood.
    """
    wanted = set(types)
    schema: dict[str, Any] = {"resource_schemas": {}, "data_source_schemas": {}}
    for module in _modules(wheel, wanted):
        for name, kind in module.kinds.items():
            if kind == "TerraformProvider":
                schema["provider"] = {"version": 0, "block": _provider_block(module, name)}
            elif kind in _KINDS:
                block = _block(module, name, module.tables[name])
                schema[_KINDS[kind]][module.types[name]] = {"version": 0, "block": block}
    found = set(schema["resource_schemas"]) | {f"data.{name}" for name in schema["data_source_schemas"]}
    if missing := wanted - found:
        raise ValueError(f"{wheel.name} has no bindings for {', '.join(sorted(missing))}")
    return schema


def _modules(wheel: Path, wanted: set[str]) -> Iterable[_Module]:
    """Read the modules of `wanted` and of the provider, in one pass over the archive in the wheel."""
    folders = {"provider"}
    for name in wanted:
        provider, _, rest = name.removeprefix("data.").partition("_")
        rest = rest.replace("_", "-")
        folders |= {f"data-{provider}-{rest}"} if name.startswith("data.") else {rest, f"{provider}-{rest}"}
    with zipfile.ZipFile(wheel) as packed:
        (inner,) = (name for name in packed.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(packed.read(inner)), mode="r:gz") as archive:
            for member in archive:
                parts = member.name.split("/")
                if parts[:2] == ["package", "lib"] and parts[3:] == ["index.js"] and parts[2] in folders:
                    file = archive.extractfile(member)
                    assert file is not None
                    yield _parse(file.read().decode().splitlines())


def _parse(lines: Sequence[str]) -> _Module:
    module = _Module()
    current = ""  # the class that is being read
    table: dict[str, dict[str, str]] | None = None
    entry: dict[str, str] = {}
    attribute: _Attribute | None = None
    for line in lines:
        if found := _CLASS.match(line):
            current, table, attribute = found[1], None, None
            module.kinds[current], module.attributes[current] = found[2], {}
        elif found := _TABLE.match(line):
            table, attribute = module.tables.setdefault(found[1], {}), None
        elif _OWN_TABLE.match(line):
            table, attribute = module.tables.setdefault(current, {}), None
        elif found := _RESOURCE_TYPE.search(line):
            module.types[current] = found[1]
        elif found := _ATTRIBUTE.match(line):
            flags = zip(("computed", "optional", "required"), found.groups()[1:], strict=True)
            attribute = _Attribute({flag: True for flag, value in flags if value == "true"})
            module.attributes[current][found[1]] = attribute
        elif table is not None:
            if found := _ENTRY.match(line):
                entry = table[found[1]] = {}
            elif found := _FACT.match(line):
                entry[found[1]] = found[2]
        elif attribute is not None:
            attribute.body.append(line)
            if line == "    }":  # of the first getter, which is all that is of interest
                attribute = None
    return module


def _block(module: _Module, owner: str, table: dict[str, dict[str, str]]) -> dict[str, Any]:
    block: dict[str, Any] = {"attributes": {}, "block_types": {}}
    for name, attribute in module.attributes[owner].items():
        facts = table.get(name, {})
        body = "\n".join(attribute.body)
        member = _MEMBER.search(body)
        nested = None if member is None else _nested(module, member[1])
        if nested is None:
            found = _type(body, member[1] if member else None, facts)
            if found is None:
                raise ValueError(f"the type of {owner}.{name} is not understood: {body!r}, {facts}")
            block["attributes"][name] = {**attribute.flags, "type": found}
            continue
        assert member is not None
        struct = nested[0].lower() + nested[1:]
        inner = _block(module, f"{nested}OutputReference", module.tables.get(struct, {}))
        single = member[1].endswith("OutputReference")
        mode = {"struct": "single"}.get(facts.get("type", ""), facts.get("type", "single" if single else "list"))
        if facts.get("isBlock") == "true":
            limits = {"max_items": 1} if single and mode in {"list", "set"} else {}
            if "required" in attribute.flags and mode in {"list", "set"}:
                limits["min_items"] = 1
            block["block_types"][name] = {"nesting_mode": mode, "block": inner, **limits}
        elif inner["block_types"]:
            raise ValueError(f"{owner}.{name} is an attribute that has blocks")
        else:
            shape = {"attributes": inner["attributes"], "nesting_mode": mode}
            block["attributes"][name] = {**attribute.flags, "nested_type": shape}
    return block


def _nested(module: _Module, name: str) -> str | None:
    """Return the struct of which `name` is an object, a list or a map; None when it is a helper of cdktn."""
    for ending in ("OutputReference", "List", "Map"):
        if name.endswith(ending) and f"{name.removesuffix(ending)}OutputReference" in module.kinds:
            return name.removesuffix(ending)
    return None


def _type(body: str, helper: str | None, facts: dict[str, str]) -> Type | None:
    getter = _GETTER.search(body)
    found = _BY_HELPER.get(helper or "") or _BY_STORAGE.get(facts.get("storageClassType", ""))
    if found is None and getter is not None:
        found = _BY_GETTER.get(getter[1])
    is_set = facts.get("type") == "set" or "Fn.tolist(" in body
    return ["set", found[1]] if is_set and isinstance(found, list) and found[0] == "list" else found


def _provider_block(module: _Module, owner: str) -> dict[str, Any]:
    """Return the provider's own block, whose attributes have no comments: all are taken to be optional."""
    block: dict[str, Any] = {"attributes": {}, "block_types": {}}
    for name, facts in module.tables[owner].items():
        if name == "alias":  # Terraform's own
            continue
        storage = facts["storageClassType"]
        if facts["isBlock"] == "true":
            struct = storage.removesuffix("List")
            table = module.tables.get(struct[0].lower() + struct[1:], {})
            inner = {
                key: {"type": _BY_STORAGE.get(fact["storageClassType"], "dynamic"), "optional": True}
                for key, fact in table.items()
            }
            mode = "set" if facts["type"] == "set" else "list"
            block["block_types"][name] = {"nesting_mode": mode, "block": {"attributes": inner, "block_types": {}}}
        else:
            block["attributes"][name] = {"type": _type("", None, facts) or "dynamic", "optional": True}
    return block
