"""Reading: `open_stream`, and the stream, the leases and the threads behind it."""

from dissociated._moved import moved

__getattr__ = moved(__name__, "dissociated.client.open")
