"""Tests of the protocol core: what a peer may rely on, and what it cannot break."""
