"""Arrow IPC: libarrow on one side, plain (header, buffers) on the other."""

from dissociated.ipc.decoder import CollectListener, DissociatedDecoder, Listener, StreamDecoder

__all__ = ["CollectListener", "DissociatedDecoder", "Listener", "StreamDecoder"]
