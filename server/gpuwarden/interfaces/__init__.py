"""The interfaces for agents and people: MCP, command line, shell hooks."""
