"""Moved, and here for one release: see dissociated.node."""

from dissociated._moved import moved

__getattr__ = moved(__name__, "dissociated.node.launch", "dissociated.node.node")
