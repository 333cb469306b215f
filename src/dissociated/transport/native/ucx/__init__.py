"""The transport over UCX."""
