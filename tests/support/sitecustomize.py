"""A module that Python imports when it starts if this directory is on its path. See `injection.py`."""

from support.injection import arm_from_environment

arm_from_environment()
