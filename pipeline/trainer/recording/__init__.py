"""Recorded steps: written while a run trains, taken again later.

recorder  writes a line for each step and, if wanted, its rows
replay    takes recorded steps again and compares the results
"""
