from .elements import identity_permutation as identity_permutation
from .groups import NormalizationGroup as NormalizationGroup
from .groups import PermutationGroup as PermutationGroup
from .groups import ScaleGroup as ScaleGroup
from .verify.certificate import Certificate as Certificate
from .verify.certificate import require_certificate as require_certificate
