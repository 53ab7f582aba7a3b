"""The boundary with Lightning."""
