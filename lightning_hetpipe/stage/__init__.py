"""What one rank holds: a run of layers, whole or split with others."""
