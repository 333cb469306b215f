"""Serving: the server, its sessions, what they may take and where they are reached."""
