"""Executes an action list on this rank: transport, runtime, emulation."""
