"""Serving: the server, its sessions, what they may take and where they are reached."""

from dissociated._moved import moved

__getattr__ = moved(__name__, "dissociated.server.server")
