"""Serving: the server, its sessions, the limits on clients, and the endpoints that clients connect to."""
