"""The words that clients and catalogs share: where datasets are, commits, descriptors, stages and URIs of catalogs."""
