"""The report of `thinwire compare` and `thinwire simulate`: one HTML file that needs nothing else.

Python writes all numbers, tables, bars and small drawings. The script draws the loss curves and reacts to the reader.
"""

from .page import render_report, write_report

__all__ = ["render_report", "write_report"]
