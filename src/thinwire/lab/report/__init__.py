"""The report of `thinwire compare`: one HTML file that needs nothing else.

Python writes every stated number, the tables and the bars; the script in it draws the curves and makes things move.
"""

from .page import render_report, write_report

__all__ = ["render_report", "write_report"]
