"""Random and mutated input to everything of rlhfd that reads some: short in a usual run, in full with ``--fuzz``."""
