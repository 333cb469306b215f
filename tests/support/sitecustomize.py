"""What Python imports when it starts, if this directory is on its path: see `injection.py`."""

from support.injection import arm_from_environment

arm_from_environment()
