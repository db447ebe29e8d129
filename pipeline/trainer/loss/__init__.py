"""Losses as formulas over tensors.

aggregation   from one loss an action to the loss of a step
kl_control    the weight of the KL, constant or adaptive
losses        clipped losses of PPO and GRPO over a batch, whitening
mini_batches  the rows of each update of a step
objective     the loss of a configuration, with weights for the difference between engine and trainer
policy        policy losses by name
row_sums      sums and means over the actions of each row
"""
