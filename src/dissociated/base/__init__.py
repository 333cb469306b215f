"""Buffers, forks, the host, errors of the system and access: what every other room stands on."""
