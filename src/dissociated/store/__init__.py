"""Where data lies: segments, each an Arrow IPC stream or file in memory that can be shared."""
