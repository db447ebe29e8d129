"""`DetachedReplayBuffer`: experience shared by any processes of one machine.

buffer  append, extend, sample
client  a client's connection to the server
queue   the server's decisions
rows    the schema that all rows share; their copy on the CPU
server  the server process, without torch
"""
