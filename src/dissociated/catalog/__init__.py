"""The server side of the catalog: datasets, their versions and the nodes that hold them, served over Arrow Flight."""
