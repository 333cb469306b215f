"""Transports move messages, tagged and untagged, and know no protocol."""
