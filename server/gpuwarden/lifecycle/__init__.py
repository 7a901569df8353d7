"""The use cases for users and agents. After a crash, the next call completes the unfinished step."""
