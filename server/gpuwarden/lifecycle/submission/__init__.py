"""The submit gate: gather facts, check them, issue a receipt, launch."""
