"""Turns a module into layers with torch.fx, and runs of layers back into modules."""
