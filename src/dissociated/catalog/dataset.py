"""The old place of the handle on a dataset."""

from dissociated._moved import moved

__getattr__ = moved(__name__, "dissociated.catalog.handle", Dataset="DatasetHandle")
