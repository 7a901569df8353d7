"""The use cases for users and agents. After a crash, the next call finishes the open step."""
