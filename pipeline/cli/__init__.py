"""The command line: each command imports its modules at its first use.

collect_env    `rlhfd collect-env`, a bug report that never fails
config         `rlhfd config`
detached       `rlhfd start --detach`
evaluate       `rlhfd eval`
init           `rlhfd init`
instances      `rlhfd ps` and `rlhfd attach`
main           the commands
options        options that commands share
page           `rlhfd page`
plan           `rlhfd plan`
recording      `rlhfd record` and `rlhfd replay`
reward_rows    the rows that `rlhfd try-reward` scores
runs           `rlhfd runs`
samples        `rlhfd samples`
service        `rlhfd systemd` and `rlhfd logs`
status         `rlhfd status`
systemd_units  the systemd units of an installation, printed, installed and removed
top            `rlhfd top`
try_reward     `rlhfd try-reward`
usage          advice for a refused command line
"""
