"""Benchmarks that compare this library with others, apart from the tests: see `python -m benchmarks --help`."""
