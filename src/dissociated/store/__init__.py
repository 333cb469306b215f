"""Storage of datasets: segments, each an Arrow IPC stream or file in memory that processes can share."""
