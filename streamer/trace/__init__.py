"""Records what an engine's own weight-loading code does to tensors that have no data yet."""
