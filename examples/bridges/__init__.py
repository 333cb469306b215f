"""Datasets in other libraries, each in a file of its own: `python -m examples.bridges.with_dask`, and so on."""
