"""The encoding of record batches, tensors and filters as Arrow IPC messages, and the decoding."""
