"""The command line: each command imports its modules at its first use.

collect_env    `rlhfd collect-env`, a bug report that never fails
config         `rlhfd config`
main           the commands
options        options that commands share
runs           `rlhfd runs`
samples        `rlhfd samples`
service        `rlhfd systemd` and `rlhfd logs`
status         `rlhfd status`
systemd_units  the systemd units of a checkout, installed and removed
top            `rlhfd top`
"""
