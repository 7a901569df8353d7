"""The MCP tools, one module per subject. Each provides `add(server, ctx)`."""
