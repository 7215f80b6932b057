"""Every record, wire message and link message that the programs agree on."""
