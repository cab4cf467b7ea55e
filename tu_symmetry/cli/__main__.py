"""``python -m tu_symmetry.cli``."""

import sys

from tu_symmetry.cli import main

sys.exit(main())
