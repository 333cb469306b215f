"""Tests of the protocol core: its guarantees to peers, and its resistance to them."""
