"""Filters: the wanted rows of a stream, their encoding for the network, and the batches without such rows."""
