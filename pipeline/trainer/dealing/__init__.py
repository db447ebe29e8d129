"""The rows of a step, dealt to the trainer's ranks for equal work.

ranks    the exchange of lengths and places between the ranks, and the batches of the rows dealt
rows     the dealing: which rank trains which row
"""
