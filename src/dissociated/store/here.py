"""Moved, and here for one release: see dissociated.node.local."""

from dissociated._moved import moved

__getattr__ = moved(__name__, "dissociated.node.local")
