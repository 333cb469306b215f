"""Published datasets: their sources, and the messages that clients are sent."""
