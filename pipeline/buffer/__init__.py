"""The experience buffer: which ticket, which batch, in which order; no torch.

admission    flow control: when a ticket may be issued and a batch leased, and which groups are dropped for others
buffer       the effect of each message on tickets, leases and ledger
context      the parts that tickets and leases share
evaluations  tickets on held-out prompts, which no trainer sees
leases       batches leased to trainer ranks
metrics      the buffer's metrics: counts of the events of tickets, leases and rows
process      the buffer process: sockets, ledger, loop
quarantine   copies of extents that are never delivered again
sizing       sizes that follow from a configuration, and their checks
snapshot     periodic snapshots of the undelivered rows on disk
spool        undelivered rows of a stopped run, on disk until the next start
tickets      tickets issued to workers
"""
