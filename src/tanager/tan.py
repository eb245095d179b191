"""The total amount of noise under its public name: see `tanager.privacy.tan`."""

from tanager.privacy.tan import PRIVACY_WALL as PRIVACY_WALL
from tanager.privacy.tan import at_batch_size as at_batch_size
from tanager.privacy.tan import at_steps as at_steps
from tanager.privacy.tan import epsilon_tan as epsilon_tan
from tanager.privacy.tan import eta as eta
from tanager.privacy.tan import eta_step as eta_step
from tanager.privacy.tan import total_noise as total_noise
