"""What happens when peers, media and machines misbehave: over real sockets, real shared memory, real processes."""
