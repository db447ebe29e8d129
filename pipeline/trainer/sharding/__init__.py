"""The built-in trainer's models sharded over its ranks with torch's `fully_shard` (FSDP2).

checkpoints   checkpoints written a tensor at a time, read a slice at a time
models        the models of a run loaded slice by slice onto their ranks, and passes through them
optimizer     the optimizer of a rank's shards
ranks         collectives of a publish and a checkpoint; passes of all ranks in step
reduction     gathered gradients summed to shards on CPUs, without a copy of them
remote        the shards of a rank on another machine, through its gateway
replicas      copies of the models, each over ranks of its own
tensor_files  safetensors files, read by slices and written a tensor at a time
"""
