"""The Lightning strategy."""
