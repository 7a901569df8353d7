"""The interfaces for agents and users: MCP, command line, shell hooks."""
