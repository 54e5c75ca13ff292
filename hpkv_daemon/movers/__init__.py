"""Movers: one disposable process per device that copies between an engine's memory and the pool."""
