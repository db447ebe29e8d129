"""Shared memory and extents on disk; no torch.

allocator       allocator of extents
arena           the arena's file and its mapping
card_turns      turns of trainer and engine on a card that they share
control_groups  the memory limit of a container or job
extent_file     extents on disk, whole or absent
files           files allocated, written whole, renamed and flushed
index           sums over records
layout          offsets of the ledger's parts
ledger          every ticket, extent and row, one transaction a change
recording       the recorded steps of a run, read
records         the ledger's records, and their bytes
redo_log        several writes, applied all or none
sealed_json     JSON records with a checksum of their own
step_lines      lines of optimizer steps, each step once
tables          vacant leases, prompts to issue again, versions
truncation      files that another program cuts off
weights_header  the newest weights
"""
