"""Memory that the host does not read: what can be done with it (`base`), and on which devices."""
