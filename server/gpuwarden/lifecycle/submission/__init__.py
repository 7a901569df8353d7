"""The submit gate: gather facts, check them, issue a receipt, and launch the job."""
