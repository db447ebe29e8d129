"""`DetachedReplayBuffer`: experience shared by any processes of one machine.

buffer  append, extend, sample
client  a client's connection to the server
queue   the server's decisions
rows    the fields that rows have in common
server  the server process, without torch
"""
