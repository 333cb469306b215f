"""The vocabulary shared by clients and catalogs: locations, commits, descriptors, stages and the URIs of catalogs."""
