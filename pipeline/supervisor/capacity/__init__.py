"""The fit of a run on a machine, before anything is loaded.

budgets  each memory of a run: what it has and needs, and the keys that lower the need
choices  sharding, training passes and the place of the training state, chosen by the fit
disk     the disk of the state directory
machine  the GPUs and the memory of a machine
"""
