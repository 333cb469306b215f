"""The client: `connect` and `open_stream`, and the streams, leases and threads behind them."""
