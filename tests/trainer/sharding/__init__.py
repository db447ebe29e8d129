"""The trainer's models sharded over ranks."""
