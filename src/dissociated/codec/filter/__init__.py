"""Filters: which rows of a stream are wanted, how that travels, and which batches cannot have such rows."""
