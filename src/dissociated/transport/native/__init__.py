"""The transports over UCX and libfabric, and the parts that they share."""
