"""Attention inside other frameworks. Nothing here is imported unless a user imports it."""
