"""The dealing of rows to the trainer's ranks."""
