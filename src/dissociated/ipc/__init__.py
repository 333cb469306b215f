"""Arrow IPC: libarrow on one side, plain (header, buffers) on the other."""
