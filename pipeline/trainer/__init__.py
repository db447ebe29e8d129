"""The trainer: steps, publishes, checkpoints, resumes.

batch             a loss's inputs: checked, filtered, cut to size
card_memory       a rank's memory of its card against the plan
checkpoints       Hugging Face folders with the training state, whole or absent
connect           connections over ZeroMQ; `pipeline.connect`
connection        the trainer's connection to the buffer
dealing           the rows of a step, dealt to the ranks for equal work
external_metrics  the metrics of an external trainer's rank
hooks             optional behaviour beside a trainer's steps
learner           one step of PPO or GRPO
loss              losses as formulas over tensors
meeting           ranks of several machines meet in one process group
metrics           a rank's metrics
optimizer         the step of one model over ranks; the learning rate
passes            forward passes of a micro-batch
prefetch          batches copied to the device ahead of use
process           the process of a rank
publish_check     refusal of weights that workers could not use
ray               ranks on other machines of a cluster: their gateways
recording         steps recorded, and taken again
remote            a rank on another machine, and its wire to the gateway
resume            the point from which a trainer starts
row_means         means over the rows of a step, by name
saving            checkpoints written beside training
session           a rank's leases and messages with the buffer
setup             makes the embedded model: `prepare` and its process
sharding          models sharded over the ranks
spreading         the first rank's start, sent to ranks on other machines
state             the training state beside the weights; the learner's interface
step_log          a line of `metrics.jsonl` for each step
step_stats        the statistics of one step
trainer           a rank's decisions: step, publish, end
update_rules      AdamW, AdamW of 8 bits, Muon
"""
