"""Ranged GETs over HTTP/1.1 into memory that the caller owns: parser, checks, retries, connections."""
