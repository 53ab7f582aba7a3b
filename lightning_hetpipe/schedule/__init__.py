"""Action lists: generated, validated, simulated, drawn and executed."""
