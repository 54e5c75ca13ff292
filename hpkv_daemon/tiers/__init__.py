"""Where blocks go beyond the pool."""
