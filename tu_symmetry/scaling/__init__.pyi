from .canonical import CanonicalForm as CanonicalForm
from .profiles import MassProfile as MassProfile
from .profiles import mass_profile as mass_profile
