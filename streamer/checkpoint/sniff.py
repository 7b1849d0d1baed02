"""Names what a body really is when it is not the weights that its key promises."""

from __future__ import annotations

__all__ = ["name_foreign_body"]


def name_foreign_body(head: bytes) -> str | None:
    """Return a phrase such as "a Git LFS pointer" for the first bytes of a foreign file, else None."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer"
    lowered = text[:512].lower()
    if lowered.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page"
    if lowered.startswith(b"<?xml") or (lowered.startswith(b"<") and b"<code>" in lowered):
        return "an XML document, perhaps an error of the store"
    if text.startswith(b"GGUF"):
        return "a GGUF file"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive, perhaps a PyTorch checkpoint"
    if text.startswith(b'{"') and lowered.rstrip().endswith(b"}"):
        return "a JSON document"
    return None
