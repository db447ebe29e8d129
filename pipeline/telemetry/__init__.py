"""Metrics, logs and samples; no torch.

activity         wall time of a process by activity
carried_records  log records of a process on another machine
dashboards       alerts and dashboards for Prometheus and Grafana
engine_view      the workers' engines, from readings
evaluations      results of held-out prompts, and evaluations.jsonl
exposition       the text that Prometheus scrapes
history          metrics over time, coarser with age
journald         the systemd journal's protocol
log              log records as text or JSON
log_file         a log file of bounded size
log_lines        log lines parsed
metrics          every metric, declared once
number_names     the names of the further numbers of reward functions
reader           all slots added up
run_log          a run's log, in the journal or in a file
samples          rollouts on disk for people to read
slab             metrics of all processes in shared memory
stdio            output that never waits for its reader
window           samples over a window of time
writer           handles on a process's own slot
"""
