"""The operations that users and agents call. After a crash, the next call completes the unfinished step."""
