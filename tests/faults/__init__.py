"""Misbehaving peers, media and machines, over real sockets, real shared memory and real processes."""
