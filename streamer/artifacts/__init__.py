"""Copies on this machine of what is not weights: configuration, tokenizers, code, adapters."""
