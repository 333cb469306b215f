"""Status, metrics, changes and logs of a server."""
