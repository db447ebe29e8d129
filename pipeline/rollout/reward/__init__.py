"""Rewards: functions of the user, called in processes that can be killed, as a reward model.

functions  reward functions as a reward model
pool       reward functions in processes that can be killed
problems   the log of rows without a reward: each cause once
process    the process of a pool
trial      the configured reward on given rows: `rlhfd try-reward`
wire       messages of a pool
"""
