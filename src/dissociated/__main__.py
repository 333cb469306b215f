"""`python -m dissociated`."""

import sys

from dissociated.cli import main

sys.exit(main())
