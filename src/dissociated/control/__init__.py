"""The vocabulary shared by clients and catalogs: commits, versions, descriptors, locations, access, catalog URIs."""
