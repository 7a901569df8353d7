"""The rehearsal: a simulated metered cloud on this machine, with real processes, real files and simulated money."""
