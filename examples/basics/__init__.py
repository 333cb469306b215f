"""First steps, each in a file of its own: `python -m examples.basics.publish`, and so on."""
