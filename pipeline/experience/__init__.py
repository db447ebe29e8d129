"""Experience: batches, rows, and their bytes in an extent.

advantage_estimators  advantages by name, penalty of length
advantages            KL terms, rewards per action, GAE, group advantages
batching              split, strip, pad, batch
checks                checks of rows and batches
codec                 RaggedRows or Experience to the bytes of an extent and back; the gather of rows of extents
extent_format         header and columns of an extent
field_arrays          fields of a padded batch as arrays, and their headers
ragged                RaggedRows: rows end to end, and the doors from and to padded batches
row_spans             spans of rows within their padding
running_moments       running mean and deviation of numbers of each step
saved_rows            rows in quarantine and of recorded steps, read back into tensors
tensor_pool           memory of batches, reused
types                 Experience, BufferItem and their vision-language kin
vision                checks of pixels, grids and image counts
vision_codec          images in an extent
vision_rows           pixels of selected rows
"""
