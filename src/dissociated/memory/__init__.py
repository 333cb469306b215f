"""Memory that peers can address, and the leases that keep it."""
