"""Foundations of every other room: buffers, forks, the host, system errors, interrupts, and the limited log."""
