"""Experience: batches, rows, and their bytes in an extent.

advantage_estimators  advantages by name, penalty of length
advantages            KL terms, rewards per action, GAE, group advantages
batching              split, strip, pad, batch
checks                checks of rows and batches
codec                 Experience to the bytes of an extent and back; the gather into one batch
extent_format         header and blocks of an extent
field_arrays          fields of a padded batch as arrays, and their headers
quarantine_reader     quarantine files, read back into tensors
recorded_batches      the batches of recorded steps, read back into tensors
row_blocks            blocks of rows, copied into extents and batches
row_kernels           choice between the loops below and NumPy
row_loops             loops over rows that numba compiles
row_spans             spans of rows within their padding
tensor_pool           memory of batches, reused
types                 Experience, BufferItem and their vision-language kin
vision                checks of pixels, grids and image counts
vision_codec          images in an extent
vision_rows           pixels of selected rows
"""
