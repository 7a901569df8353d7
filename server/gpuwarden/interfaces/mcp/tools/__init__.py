"""The MCP tools, one module per subject. Each offers `add(server, ctx)`."""
