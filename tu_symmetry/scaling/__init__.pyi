from .canonical import CanonicalForm as CanonicalForm
from .epsilon import normalization_epsilons as normalization_epsilons
from .epsilon import scale_with_epsilon as scale_with_epsilon
from .profiles import MassProfile as MassProfile
from .profiles import mass_profile as mass_profile
