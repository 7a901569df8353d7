"""The MCP tools, one file for each subject. Each has `add(server, w)`, which puts its tools on a server."""
