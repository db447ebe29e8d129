"""Published policy versions in shared memory.

copies        a version outside shared memory, for another machine
differences   the changed words between two versions
held          a published version read in place
pinned        page-locked memory, and copies between it and a card
probe         one question that trainer and worker must answer alike
sending       a version to other machines, once to each: whole, or its difference
shards        a rank's ranges of tensors, and the ranks that hold all
slot_copy     copy and fingerprint of tensors in a slot
store         publisher and reader of the slots
tensor_specs  the tensors of a slot: dtype, shape and offset of each
versions      versions of one rank or several, with the training state before them
"""
