"""Decides where layers run: numbers in, a plan out. No torch."""
