"""The interfaces for agents and users: MCP, HTTP, command line and shell hooks."""
