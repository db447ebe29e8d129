"""Recorded steps: written while a run trains, taken again later.

bases     the checkpoint that each step is taken again from; no torch
recorder  writes a line for each step and, if wanted, its rows
replay    takes recorded steps again and compares the results
"""
