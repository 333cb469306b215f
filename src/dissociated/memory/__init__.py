"""Memory that peers can address, and who still holds which part of it."""
