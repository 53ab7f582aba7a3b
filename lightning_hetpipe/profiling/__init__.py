"""Measures layers, links and memory; keeps what was measured."""
