"""Hydra configuration that ships with the package: clusters, models, experiments."""
