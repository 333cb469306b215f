"""Memory of devices such as GPUs: its operations (`Device`), and the supported devices."""
