"""The process behind a `DetachedReplayBuffer`, and the way to it; nothing here loads torch."""
