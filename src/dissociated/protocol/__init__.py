"""The Dissociated IPC Protocol itself: no sockets, no threads, no clocks, no pyarrow.

Everything here turns bytes into meaning and meaning into bytes, and says what may follow what. It is the part
to port to another language.
"""
