"""Where a role runs: in processes of this machine, or all of them in one."""
