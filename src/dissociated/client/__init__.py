"""Reading: `open_stream`, and the stream, the leases and the threads behind it."""
