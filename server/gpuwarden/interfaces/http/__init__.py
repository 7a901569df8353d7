"""The HTTP interface of `gpuwarden serve`: MCP, the API for metrics and alerts, and the web pages."""
