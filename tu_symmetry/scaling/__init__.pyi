from .canonical import CanonicalForm as CanonicalForm
from .masses import MassProfile as MassProfile
from .masses import mass_profile as mass_profile
from .signs import canonical_signs as canonical_signs
