from .canonical import CanonicalForm as CanonicalForm
from .canonical import normalization_epsilons as normalization_epsilons
from .canonical import scale_with_epsilon as scale_with_epsilon
from .profiles import MassProfile as MassProfile
from .profiles import mass_profile as mass_profile
