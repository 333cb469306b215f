"""Example programs that publish and read data. Each has a folder, whose first docstring tells how to run it."""
