"""Moved, and here for one release: see dissociated.monitoring.log."""

from dissociated._moved import moved

__getattr__ = moved(__name__, "dissociated.monitoring.log")
