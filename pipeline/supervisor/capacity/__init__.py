"""The fit of a run on a machine, before anything is loaded.

machine   the GPUs and the memory of a machine
places    each place of a run: what it needs there, and the keys that lower it
sharding  `trainer.sharding = "auto"`, decided by the fit
"""
