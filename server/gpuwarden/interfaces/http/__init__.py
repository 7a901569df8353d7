"""The HTTP interface of `gpuwarden serve`: MCP, the metrics and alerts contract, and the page."""
