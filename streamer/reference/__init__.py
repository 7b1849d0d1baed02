"""A small tensor-parallel engine of our own, for the demo, the tests and people without vLLM.

It loads weights the way the field describes as ideal: modules recurse, fused layers say which source
weights they are made of, and the owner of a parameter implements how it is loaded.
"""
