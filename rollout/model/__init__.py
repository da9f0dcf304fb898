"""The model as the engine runs it: read from disk, views over the caller's tensors, KV storage."""
