"""With each libfabric there is, whichever the other tests use."""
