"""Prompts of JSON lines, Parquet and Arrow files, as an endless sequence in which a position alone is the state.

chat        chat messages in the form that a template takes
check       all rows read once, broken ones named
files       the files of a path, a folder or a data set by name
lines       JSON lines
order       the permutation of each epoch; several sources by weight
pass_rates  rows with the share of their responses that passed
passes      the end of a run after some passes over the prompts
rendering   token ids of a prompt
rows        a row as prompt, answer, images and further columns
source      random access to the endless sequence
tables      Parquet and Arrow
types       a prompt and its parts

Position p of the sequence lies in epoch p // n at slot p % n, and each epoch is a permutation of all n prompts that
follows from (seed, epoch) by integer arithmetic alone. With several sources, position p is number k of one of them by
the same arithmetic. So any process can look up any position, a restart needs the
position and no other state, and platform, Python and numpy versions do not change the order.
"""
