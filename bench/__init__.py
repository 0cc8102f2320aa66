"""Benchmarks: what Midstream costs, beside a server that does nothing but the wire (`floor.py`), in one run.

`python -m bench` builds the two C programs, measures, and prints a table of figures, ratios and budgets.
Nothing here is a test: a figure over its budget is marked, and fails nothing.
"""
