"""A node: the server of a store on a host."""
