"""What `gpuwarden serve` answers over HTTP: MCP, the metrics and alerts contract, and the page."""
