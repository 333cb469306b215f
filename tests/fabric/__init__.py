"""Tests of each installed libfabric, whichever the other tests use."""
