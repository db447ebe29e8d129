"""Rewards: functions of the user, called in processes that can be killed, as a reward model.

answers       the answer of a response, and the fenced blocks of its Markdown
code          the reward `code`: tests of a row in a limited process
foreign       reward functions of TRL and verl, called as their trainers call them
functions     reward functions as a reward model
given_rows    the rows of a call, also for another process
math_process  the process of `math`: math-verify with limits
math_text     quantities as math-verify reads them
mathematics   the reward `math`: results compared with answers
named         reward functions by name: exact, math, regex and others
numbers       the further numbers of a function, beside the reward
own_tokenizer  a reward model with a tokenizer of its own
pool          reward functions in processes that can be killed
process       the processes of a pool
remote        the rewards `remote` and `judge`, of a service
row_rewards   the weighted sums of the scores of functions, and rows without one in the log
sandbox       the limited process of `code`
service       requests to a service: attempts, deadline, circuit breaker
signatures    the call of a function by its signature: batched, async, its columns
summed        the weighted sum of reward models and functions
trial         the configured reward on given rows: `rlhfd try-reward`
wire          messages of a pool
"""
