"""The supervisor: starts, watches, restarts and ends the processes; no torch.

capacity    the fit of a run on a machine
cluster_nodes  the nodes of a Ray cluster
diagnosis   the cause of a slow or stopped run, in sentences
ended_page  the page's data of a run that is not running
exits       the consequence of each child's exit
external    an external trainer's ranks: connected, or left
fleet       the child processes; the OOM killer's count
gpus        GPU readings from NVML
hangs       hang detection, pure
inputs_watch  the files of a run while it goes on
live        the live panel of `rlhfd start`
notes       notes on a configuration that can run and may not be meant
pace        steps, and the rate of a counter
page        data of the page's requests
placement   GPU and CPU cores of each process
preflight   checks of the files that a configuration names
reload      the configuration reloaded during a run
restarts    backoff and the limit of starts
shutdown    the orderly shutdown
status      one reading of metrics and children
supervisor  the supervisor process
systemd     sd_notify, readiness and the watchdog of systemd
watchdog    hung processes named, dumped and killed
web         the HTTP server
"""
