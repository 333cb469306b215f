"""Transports, which move tagged and untagged messages, and know no protocol."""
