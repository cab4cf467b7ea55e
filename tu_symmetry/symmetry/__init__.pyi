from .certificate import require_certificate as require_certificate
from .elements import identity_permutation as identity_permutation
from .groups import NormalizationGroup as NormalizationGroup
from .groups import PermutationGroup as PermutationGroup
from .groups import ScaleGroup as ScaleGroup
from .running.comparison import Certificate as Certificate
