"""The drawing module of reports, studies, plans and benchmarks: charts, axes, numbers, colours and pages.

Everything is text: SVG and HTML that need no script and fetch nothing.
"""

from .axis import Axis
from .bars import Bar, bars
from .chart import Line, lines

__all__ = ["Axis", "Bar", "Line", "bars", "lines"]
