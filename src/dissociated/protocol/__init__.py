"""The Dissociated IPC Protocol, without sockets, threads, clocks or pyarrow.

This room encodes and decodes messages, and checks their order. It is the part to port to another language.
"""
