"""The transport over libfabric."""
