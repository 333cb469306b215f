"""Arrow Flight as pure control plane: what there is, and where it can be had."""
