"""``python -m tu_symmetry``, which ``torchrun -m tu_symmetry`` starts several times."""

import sys

from tu_symmetry.cli import main

sys.exit(main())
