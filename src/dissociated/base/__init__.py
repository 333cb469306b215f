"""Foundations of every other room: buffers, forks, the host, system errors, and access."""
