"""Rows of several turns: an environment of the user's answers each response until the row is done.

pool       environments in processes that can be killed, one object a row
process    one of these processes
turn_rows  rows of several turns as one response each
turns      the turns of a ticket: requests, responses, observations and rewards
types      the interface: `Environment`, `Turn`
verifiers  environments of the `verifiers` library as an `Environment`
wire       messages between a pool and its processes
"""
