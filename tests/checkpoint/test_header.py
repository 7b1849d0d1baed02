"""The header parser accepts and refuses what safetensors 0.8 does, however its input is cut."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from streamer.checkpoint.dtypes import DTYPE_BITS
from streamer.checkpoint.header import MAX_HEADER_BYTES, FileHeader, HeaderParser
from streamer.errors import HeaderError
from tests.files import entry, raw_file

ONE = b'"dtype":"F32","shape":[1],"data_offsets":[0,4]'
B4 = bytes(4)


def nested(depth: int) -> bytes:
    return raw_file(b'{"a":{"x":' + b"[" * depth + b"]" * depth + b"," + ONE + b"}}", B4)


#: Everything in one table; which side it falls on is asked of safetensors itself, and recorded here.
LOADS = {
    "empty object": raw_file(b"{}"),
    "metadata only": raw_file(b'{"__metadata__":{"a":"b"}}'),
    "metadata null": raw_file(b'{"__metadata__":null,"a":{' + ONE + b"}}", B4),
    "metadata duplicate key": raw_file(b'{"__metadata__":{"k":"a","k":"b"},"a":{' + ONE + b"}}", B4),
    "leading white space": raw_file(b'\n\t\r {"a":{' + ONE + b"}}", B4),
    "trailing white space": raw_file(b'{"a":{' + ONE + b"}} \n", B4),
    "unknown field": raw_file(b'{"a":{"x":[1,{"y":2}],' + ONE + b"}}", B4),
    "unknown field twice": raw_file(b'{"a":{"x":1,"x":2,' + ONE + b"}}", B4),
    "identical duplicate": raw_file(b'{"a":{' + ONE + b'},"a":{' + ONE + b"}}", B4),
    "last duplicate counts": raw_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"a":{' + ONE + b"}}", B4),
    "entry as array": raw_file(b'{"a":["F32",[1],[0,4]]}', B4),
    "dtype as map": raw_file(b'{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}', B4),
    "empty name": raw_file({"": entry("F32", [1], 0, 4)}, B4),
    "unicode name": raw_file({"模型.重量😀": entry("F32", [1], 0, 4)}, B4),
    "escaped nul in name": raw_file(b'{"a\\u0000":{' + ONE + b"}}", B4),
    "surrogate pair": raw_file(b'{"\\ud83d\\ude00":{' + ONE + b"}}", B4),
    "scalar": raw_file({"a": entry("F32", [], 0, 4)}, B4),
    "zero elements anywhere": raw_file(
        {"z": entry("F32", [0], 4, 4), "a": entry("F32", [1], 0, 4), "y": entry("F64", [3, 0], 0, 0)}, B4
    ),
    "zero times huge": raw_file(
        b'{"a":{"dtype":"F32","shape":[0,18446744073709551615,18446744073709551615],"data_offsets":[0,0]}}'
    ),
    "huge times zero": raw_file(b'{"a":{"dtype":"F32","shape":[18446744073709551615,0],"data_offsets":[0,0]}}'),
    "unaligned after odd bytes": raw_file({"a": entry("U8", [3], 0, 3), "b": entry("F32", [1], 3, 7)}, bytes(7)),
    "nested 125 deep": nested(125),
    "huge integer in an unknown field": raw_file(b'{"a":{"x":' + b"9" * 40 + b"," + ONE + b"}}", B4),
    "keys in any order": raw_file({"b": entry("F32", [1], 4, 8), "a": entry("F32", [1], 0, 4)}, bytes(8)),
    "packed F4": raw_file({"a": entry("F4", [2, 8], 0, 8)}, bytes(8)),
    "packed F6": raw_file({"a": entry("F6_E2M3", [4], 0, 3)}, bytes(3)),
    **{f"header length {8 * 4 + k} mod 8": raw_file(b'{"a":{' + ONE + b"}}" + b" " * k, B4) for k in range(8)},
}
REFUSED = {
    "hole at the start": raw_file({"a": entry("F32", [1], 4, 8)}, bytes(8)),
    "hole in the middle": raw_file({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12)),
    "overlap": raw_file({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, bytes(8)),
    "two names on one range": raw_file({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, B4),
    "empty tensor inside another": raw_file({"z": entry("F32", [0], 2, 2), "a": entry("F32", [1], 0, 4)}, B4),
    "trailing bytes": raw_file({"a": entry("F32", [1], 0, 4)}, bytes(5)),
    "truncated body": raw_file({"a": entry("F32", [1], 0, 4)}, bytes(3)),
    "size is not shape times dtype": raw_file({"a": entry("F32", [2], 0, 4)}, B4),
    "begin after end": raw_file({"a": entry("F32", [1], 4, 0)}, B4),
    "metadata number": raw_file(b'{"__metadata__":{"k":1}}'),
    "metadata nested": raw_file(b'{"__metadata__":{"k":{"l":"m"}}}'),
    "metadata null value": raw_file(b'{"__metadata__":{"k":null}}'),
    "metadata array": raw_file(b'{"__metadata__":[]}'),
    "metadata twice": raw_file(b'{"__metadata__":{},"__metadata__":{}}'),
    "byte order mark": raw_file(b'\xef\xbb\xbf{"a":{' + ONE + b"}}", B4),
    "NUL padding": raw_file(b'{"a":{' + ONE + b"}}\0", B4),
    "vertical tab": raw_file(b'\x0b{"a":{' + ONE + b"}}", B4),
    "duplicate with other offsets": raw_file(
        b'{"a":{' + ONE + b'},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', B4
    ),
    "first duplicate malformed": raw_file(b'{"a":3,"a":{' + ONE + b"}}", B4),
    "field twice": raw_file(b'{"a":{"dtype":"F32",' + ONE + b"}}", B4),
    "field twice, escaped": raw_file(b'{"a":{"d\\u0074ype":"F32",' + ONE + b"}}", B4),
    "no shape": raw_file(b'{"a":{"dtype":"F32","data_offsets":[0,4]}}', B4),
    "shape null": raw_file(b'{"a":{"dtype":"F32","shape":null,"data_offsets":[0,4]}}', B4),
    "negative shape": raw_file({"a": entry("F32", [-1], 0, 4)}, B4),
    "float shape": raw_file(b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', B4),
    "boolean shape": raw_file(b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', B4),
    "minus zero": raw_file(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
    "float offsets": raw_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4.0]}}', B4),
    "three offsets": raw_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}}', B4),
    "one offset": raw_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}', B4),
    "offsets as object": raw_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":{"0":0,"1":4}}}', B4),
    "65 bits": raw_file(b'{"a":{"dtype":"F32","shape":[18446744073709551616,0],"data_offsets":[0,0]}}'),
    "product overflows": raw_file(
        b'{"a":{"dtype":"F32","shape":[18446744073709551615,18446744073709551615,0],"data_offsets":[0,0]}}'
    ),
    "array as header": raw_file(b"[]"),
    "number as header": raw_file(b"3"),
    "entry null": raw_file(b'{"a":null}'),
    "array entry too long": raw_file(b'{"a":["F32",[1],[0,4],5]}', B4),
    "invalid UTF-8": raw_file(b'{"\xc0\xaf":{' + ONE + b"}}", B4),
    "encoded surrogate": raw_file(b'{"\xed\xa0\x80":{' + ONE + b"}}", B4),
    "lone surrogate": raw_file(b'{"\\ud800":{' + ONE + b"}}", B4),
    "lone surrogate in an unknown field": raw_file(b'{"a":{"x":"\\udc00",' + ONE + b"}}", B4),
    "control character": raw_file(b'{"a\x01":{' + ONE + b"}}", B4),
    "NaN in an unknown field": raw_file(b'{"a":{"x":NaN,' + ONE + b"}}", B4),
    "number out of range": raw_file(b'{"a":{"x":1e400,' + ONE + b"}}", B4),
    "integer out of range": raw_file(b'{"a":{"x":' + b"9" * 400 + b"," + ONE + b"}}", B4),
    "leading zero": raw_file(b'{"a":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}', B4),
    "nested 126 deep": nested(126),
    "nested 5000 deep": nested(5000),
    "text after the header": raw_file(b'{"a":{' + ONE + b"}} x", B4),
    "header length 0": raw_file(b"", B4),
    "header past the end": raw_file(b"{}", length=3),
    "header length 200 MB": raw_file(b"{}", length=200_000_000),
    "header length 2^63": raw_file(b"{}", length=1 << 63),
    "no bytes": b"",
    "seven bytes": b"\0" * 7,
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n",
    "HTML": b"<!DOCTYPE html><html><body>Not found</body></html>",
    "XML": b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>",
    "packed F4, odd count": raw_file({"a": entry("F4", [3], 0, 2)}, bytes(2)),
    "C128": raw_file({"a": entry("C128", [1], 0, 16)}, bytes(16)),
    "I4": raw_file({"a": entry("I4", [2], 0, 1)}, bytes(1)),
    "dtype in lower case": raw_file({"a": entry("f32", [1], 0, 4)}, B4),
    "dtype number": raw_file({"a": {"dtype": 1, "shape": [1], "data_offsets": [0, 4]}}, B4),
    "old writers' metadata": raw_file(b'{},"__metadata__":{"format":"pt"}}'),
}


def parse(file: bytes) -> FileHeader:
    parser = HeaderParser("file", len(file))
    parser.feed(file)
    return parser.finish()


def ours(file: bytes) -> list[tuple[str, str, tuple[int, ...], int]] | None:
    try:
        return sorted((t.name, t.dtype, t.shape, t.nbytes) for t in parse(file).tensors)
    except HeaderError:
        return None


def theirs(file: bytes) -> list[tuple[str, str, tuple[int, ...], int]] | None:
    try:
        found = deserialize(file)  # type: ignore[no-untyped-call]
        return sorted((name, t["dtype"], tuple(t["shape"]), len(t["data"])) for name, t in found)
    except Exception:
        return None


@pytest.mark.parametrize("name", LOADS)
def test_accepts_what_safetensors_accepts(name: str) -> None:
    assert theirs(LOADS[name]) is not None
    assert ours(LOADS[name]) == theirs(LOADS[name])


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_safetensors_refuses(name: str) -> None:
    assert theirs(REFUSED[name]) is None
    assert ours(REFUSED[name]) is None


@pytest.mark.parametrize("dtype", [*DTYPE_BITS, "C128", "F8", "I4", "BF8"])
def test_dtype_table_is_theirs(dtype: str) -> None:
    for nbytes in (3, 4, 6, 8, 16, 32, 64, 128):
        file = raw_file({"a": entry(dtype, [8], 0, nbytes)}, bytes(nbytes))
        assert ours(file) == theirs(file)


@pytest.mark.parametrize("name", LOADS)
def test_one_byte_at_a_time(name: str) -> None:
    file = LOADS[name]
    whole = parse(file)
    parser = HeaderParser("file", len(file))
    for position in range(whole.data_start):
        assert parser.missing > 0, f"complete after {position} of {whole.data_start} bytes"
        parser.feed(file[position : position + 1])
    assert parser.missing == 0
    assert parser.finish() == whole


@pytest.mark.parametrize("name", LOADS)
def test_trailing_bytes_of_a_speculative_read_are_ignored(name: str) -> None:
    file = LOADS[name]
    parser = HeaderParser("file", len(file))
    parser.feed(file + b"")
    parser.feed(b"more of whatever follows")
    assert parser.finish() == parse(file)


def test_missing_asks_for_exactly_the_header() -> None:
    file = LOADS["keys in any order"]
    parser = HeaderParser("file", len(file))
    assert parser.missing == 8
    parser.feed(file[:8])
    assert parser.missing == len(file) - 8 - 8
    parser.feed(file[8:20])
    with pytest.raises(HeaderError, match="ended inside its header"):
        parser.finish()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LFS pointer", "is a Git LFS pointer .67 bytes.*upload the real file"),
        ("HTML", "an HTML page"),
        ("XML", "an XML document"),
        ("overlap", "tensors 'a' and 'b' overlap"),
        ("hole in the middle", "4 bytes before tensor 'b' belong to no tensor"),
        ("truncated body", "is truncated: its tensors take 4 bytes, the file holds 3"),
        ("trailing bytes", "followed by bytes that no tensor owns"),
        ("no shape", "tensor 'a' has no shape"),
        ("C128", "unknown dtype 'C128'"),
        ("size is not shape times dtype", r"shape \[2\] and dtype F32 needs 8 bytes"),
    ],
)
def test_messages_say_what_is_wrong(name: str, words: str) -> None:
    with pytest.raises(HeaderError, match=words) as caught:
        parse(REFUSED[name])
    assert "file" in str(caught.value)


def test_lying_length_is_refused_before_anything_is_kept() -> None:
    parser = HeaderParser("file", 1 << 40)
    with pytest.raises(HeaderError, match="at most"):
        parser.feed((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))


def test_offsets_are_absolute_and_in_data_order() -> None:
    header = parse(LOADS["keys in any order"])
    assert [tensor.name for tensor in header.tensors] == ["a", "b"]
    assert [(t.start - header.data_start, t.end - header.data_start) for t in header.tensors] == [(0, 4), (4, 8)]


_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(allow_nan=False), st.text(max_size=3), st.just([])
)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "nope", 3]),
        "shape": st.one_of(st.lists(st.integers(0, 3), max_size=3), _scalars),
        "data_offsets": st.one_of(st.lists(st.integers(0, 24), min_size=2, max_size=2), _scalars),
    },
    optional={"extra": _scalars},
)


@settings(max_examples=400, deadline=None)
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), st.one_of(_entries, _scalars), max_size=3),
    body=st.integers(0, 24),
)
def test_agrees_with_safetensors_on_generated_headers(header: dict[str, object], body: int) -> None:
    file = raw_file(header, bytes(body))
    assert ours(file) == theirs(file)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_agrees_with_safetensors_on_damaged_headers(data: st.DataObject) -> None:
    text = bytearray(
        json.dumps({"a": entry("F32", [1, 2], 0, 8), "b": entry("U8", [3], 8, 11), "__metadata__": {"k": "v"}}).encode()
    )
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(text) - 1))
        text[position] = data.draw(st.sampled_from(b'{}[]",:0123456789.eE+-\\u \n\x00\xffabF'))
    file = raw_file(bytes(text), bytes(11))
    assert ours(file) == theirs(file)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 4), max_size=3)), max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_valid_files_parse_whatever_the_order_of_keys(sizes: list[tuple[str, list[int]]], order: random.Random) -> None:
    entries, position = [], 0
    for number, (dtype, shape) in enumerate(sizes):
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        if bits % 8:
            continue
        entries.append((f"t{number}", entry(dtype, shape, position, position + bits // 8)))
        position += bits // 8
    order.shuffle(entries)
    file = raw_file(dict(entries), bytes(position))
    assert ours(file) == theirs(file) is not None
    covered = [(t.start, t.end) for t in parse(file).tensors]
    assert all(first[1] == second[0] for first, second in itertools.pairwise(covered))
