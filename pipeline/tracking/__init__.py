"""Trackers: the steps, evaluations and samples of a run, sent to TensorBoard, wandb, trackio or MLflow; no torch.

adapters   the libraries behind one interface, each imported where it is used
launcher   a process a tracker, started and restarted by the supervisor
process    the process: follows the files of the run, and sends them on
records    new lines of metrics.jsonl and new samples; the place up to which they are sent
"""
