"""Rewards: functions of the user, called in processes that can be killed, as a reward model.

code        the reward `code`: tests of a row in a limited process
functions   reward functions as a reward model
named       reward functions by name: exact, math, regex and others
parts       the column of each reward function in `info`
pool        reward functions in processes that can be killed
problems    the log of rows without a reward: each cause once
process     the process of a pool
remote      the rewards `remote` and `judge`, of a service
sandbox     the limited process of `code`
service     requests to a service: attempts, deadline, circuit breaker
signatures  the call of a function by its signature: batched, async, its columns
trial       the configured reward on given rows: `rlhfd try-reward`
wire        messages of a pool
"""
