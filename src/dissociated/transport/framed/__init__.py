"""The transports over byte streams: TCP, TLS and Unix sockets."""
