"""The rehearsal: a simulated metered cloud on this machine. Real processes, real files, simulated money."""
