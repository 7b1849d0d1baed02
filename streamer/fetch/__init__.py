"""Runs reads concurrently into bounded memory and hands the bytes to whoever copies them."""
