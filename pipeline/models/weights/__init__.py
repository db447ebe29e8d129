"""Published policy versions in shared memory.

pinned     the ring of page-locked buffers
probe      one question that trainer and worker must answer alike
slot_copy  copy and fingerprint of tensors in a slot
store      publisher and reader of the slots
versions   versions with the training state before them
"""
