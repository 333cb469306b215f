"""The version of this package, for whoever says it."""

__version__ = "0.1.0"
