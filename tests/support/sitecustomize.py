"""What Python imports when it starts, if this directory is on its path: see `faults.py`."""

from faults import arm_from_environment

arm_from_environment()
