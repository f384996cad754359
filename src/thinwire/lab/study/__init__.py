"""`thinwire study`: the distribution of gradients, the effect of error feedback on it, and the energy Top-k leaves out.

`thinwire.study` is the function to call: `with thinwire.study(model): ...`. The modules in here are
imported by name, `from thinwire.lab.study.bounds import contraction`.
"""

from .bounds import contraction
from .portrait import Lens, portrait
from .sampler import Study, study

__all__ = ["Lens", "Study", "contraction", "portrait", "study"]
